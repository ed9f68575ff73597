"""llama.cpp, driven through its batch API in its own environment: `python -m benchmarks.peers.llama FILE.gguf
THREADS`."""

import ctypes
import sys

import llama_cpp as lib
import numpy as np

from benchmarks.peers.clock import MAX_ANSWER, MAX_TOKENS_IN_STEP, Clock, Prompts, measure


class Llama:
    def __init__(self, path: str, threads: int):
        lib.llama_backend_init()
        self.model = lib.llama_model_load_from_file(path.encode(), lib.llama_model_default_params())
        self.vocab_size = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self.model))
        self.threads = threads
        self.batch = lib.llama_batch_init(MAX_TOKENS_IN_STEP, 0, 1)

    def context(self, num_requests: int, prompt_len: int) -> ctypes.c_void_p:
        params = lib.llama_context_default_params()
        params.n_seq_max = num_requests
        # llama.cpp divides it evenly, in multiples of 256.
        params.n_ctx = num_requests * -(-(prompt_len + MAX_ANSWER) // 256) * 256
        params.n_batch = MAX_TOKENS_IN_STEP
        params.n_threads = params.n_threads_batch = self.threads
        return lib.llama_init_from_model(self.model, params)

    def put(self, place: int, token: int, position: int, request: int, wanted: bool) -> None:
        batch = self.batch
        batch.token[place], batch.pos[place], batch.n_seq_id[place] = token, position, 1
        batch.seq_id[place][0], batch.logits[place] = request, wanted

    def step(self, context: ctypes.c_void_p, num_tokens: int, rows: range) -> list[int]:
        """Run the batch. Return the most likely next token after each of these rows."""
        self.batch.n_tokens = num_tokens
        status = lib.llama_decode(context, self.batch)
        assert status == 0, f"llama_decode: {status}"
        logits = (lib.llama_get_logits_ith(context, row) for row in rows)
        return [int(np.argmax(np.ctypeslib.as_array(one, (self.vocab_size,)))) for one in logits]

    def run(self, prompts: Prompts, answer_len: int, clock: Clock) -> None:
        count, length = len(prompts), len(prompts[0])
        context = self.context(count, length)
        for request, ids in enumerate(prompts):
            for position, token in enumerate(ids):
                self.put(request * length + position, token, position, request, position == length - 1)
        clock.start(count)
        num_tokens, rows = count * length, range(length - 1, count * length, length)
        for position in range(length, length + answer_len):
            for request, token in enumerate(self.step(context, num_tokens, rows)):
                clock.tick(request, 1)
                self.put(request, token, position, request, True)
            num_tokens, rows = count, range(count)
        lib.llama_free(context)


if __name__ == "__main__":
    measure(Llama(sys.argv[1], int(sys.argv[2])).run)
