"""A child of the fake server: notes its start and its end in FOLDER/notes, and follows its instructions in between."""

import os
import signal
import subprocess
import sys
import time

UNTIL_OVER = """
import os, sys, time
while not os.path.exists(sys.argv[1] + "/over"):
    time.sleep(0.2)
"""


def note(folder: str, text: str) -> None:
    with open(f"{folder}/notes", "a") as file:
        file.write(f"{text}\n")


def main(name: str, what: str, folder: str) -> None:
    def end(*_):
        if what != "stubborn":
            note(folder, f"{name} ended")
            os._exit(0)

    signal.signal(signal.SIGTERM, end)
    if what in ("with helper", "with daemon"):
        command = [sys.executable, "-S", "-c", UNTIL_OVER, folder]
        helper = subprocess.Popen(command, start_new_session=what == "with daemon")
        note(folder, f"{name} helper {helper.pid}")
    note(folder, f"{name} started")
    if what == "failing":
        sys.stderr.write("the last words of a failing child\n")
        sys.exit(7)
    if what == "losing a host":
        with open(f"{folder}/notes") as notes:
            if notes.read().count(f"{name} started") < 5:
                sys.exit(os.EX_TEMPFAIL)
    while not os.path.exists(f"{folder}/over"):
        time.sleep(0.2)


if __name__ == "__main__":
    main(*sys.argv[1:])
