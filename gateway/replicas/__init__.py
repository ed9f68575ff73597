"""Replicas: several servers of one model, each of which is front end and worker.

A front end chooses a replica for each request (`placement.py`), forwards the request at most once, and continues the
answer at another replica if the first one is lost (`backend.py`). `replica_set.py` keeps the connections and polls the
state of the others; `served.py` records what this server has computed and tells it to the others.
"""
