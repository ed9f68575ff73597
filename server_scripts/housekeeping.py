"""What a server that runs for months needs now and then: bounded logs, and a run directory that is not swept away."""

from __future__ import annotations

import logging
import sys
import time

from engine.settings.config import Config
from server_scripts import logs
from server_scripts.processes import log_paths
from server_scripts.run_dir import RunDir

log = logging.getLogger("supervisor")

LOGS_EVERY_S = 5.0
RUN_DIR_EVERY_S = 3600.0


class Housekeeper:
    """`tend` is called at every tick of the supervisor. With `copy_to_console` the logs go to our output, too."""

    def __init__(self, config: Config, run_dir: RunDir, copy_to_console: bool):
        self._paths = log_paths(config)
        self._max_bytes, self._num_backups = config.log_max_bytes, config.log_backup_count
        self._run_dir = run_dir
        self._logs_at = self._run_dir_at = time.monotonic()
        followed = {name: path for name, path in self._paths.items() if name != "supervisor"}
        self._follower = logs.Follower(followed, sys.stdout) if copy_to_console else None

    def tend(self) -> None:
        now = time.monotonic()
        if self._follower:
            try:
                self._follower.copy()
            except OSError:  # of a file that is just being taken away; the next time is soon
                pass
        try:
            if now - self._logs_at > LOGS_EVERY_S:
                self._logs_at = now
                for path in self._paths.values():
                    logs.bound(path, self._max_bytes, self._num_backups)
            if now - self._run_dir_at > RUN_DIR_EVERY_S:
                self._run_dir_at = now
                self._run_dir.touch_all()
        except OSError as error:
            log.warning("housekeeping: %s", error)
