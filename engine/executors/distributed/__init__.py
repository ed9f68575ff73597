"""One model on several ranks and hosts. `RanksExecutor` (ranks.py) sends each call to the ranks of a host, which are
processes of their own (rank_process.py). `HostsExecutor` (hosts.py) sends it to other hosts, which find each other by
rendezvous.py."""
