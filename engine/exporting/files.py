"""What the files of an exported model are called that others than its readers look at."""

CONFIG, MANIFEST = "config.json", "manifest.json"
