"""Names of files of an exported model that are used outside the package."""

CONFIG, MANIFEST = "config.json", "manifest.json"
