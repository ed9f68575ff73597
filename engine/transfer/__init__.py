"""Transfer of KV blocks between engines: a prefill instance computes prompts and serves their blocks (`server.py`), a
decode instance pulls them (`client.py`), in messages over TCP (`messages.py`). Between GPUs of one host, messages only
say where the blocks are, and the decode instance copies them from GPU to GPU.

The decode instance pulls because it then decides when its memory is written: nothing that arrives late can reach blocks
that it has given to other requests. Transfers run in a thread of their own, so the engine loop never waits for them.
"""
