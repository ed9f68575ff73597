"""vLLM in one process, stepped in its own environment: `python -m benchmarks.peers.vllm MODEL_DIR THREADS`."""

import os
import sys

from benchmarks.peers.clock import MAX_REQUESTS, MAX_TOKENS_IN_STEP, Clock, Prompts, measure


def main(model: str) -> None:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams  # vLLM reads the variable when it is imported

    limits = {"max_model_len": 2048, "max_num_batched_tokens": MAX_TOKENS_IN_STEP, "max_num_seqs": MAX_REQUESTS}
    llm = LLM(model=model, skip_tokenizer_init=True, dtype="bfloat16", enable_prefix_caching=False, **limits)
    engine = llm.llm_engine

    def run(prompts: Prompts, answer_len: int, clock: Clock) -> None:
        sampling = SamplingParams(max_tokens=answer_len, ignore_eos=True, temperature=0, detokenize=False)
        seen = [0] * len(prompts)
        clock.start(len(prompts))
        for index, ids in enumerate(prompts):
            engine.add_request(str(index), {"prompt_token_ids": ids}, sampling)
        while engine.has_unfinished_requests():
            for output in engine.step():
                index, length = int(output.request_id), len(output.outputs[0].token_ids)
                clock.tick(index, length - seen[index])
                seen[index] = length

    measure(run)


if __name__ == "__main__":
    main(sys.argv[1])  # the number of threads comes from an environment variable
