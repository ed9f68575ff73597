"""OpenVINO GenAI, stepped in its own environment: `python -m benchmarks.peers.openvino MODEL_DIR THREADS`."""

import itertools
import sys

import numpy as np
import openvino
import openvino_genai

from benchmarks.peers.clock import MAX_REQUESTS, MAX_TOKENS_IN_STEP, Clock, Prompts, measure


def main(model: str, threads: str) -> None:
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = 4  # GB
    scheduler.max_num_batched_tokens, scheduler.max_num_seqs = MAX_TOKENS_IN_STEP, MAX_REQUESTS
    scheduler.enable_prefix_caching = False
    properties = {"INFERENCE_NUM_THREADS": int(threads), "INFERENCE_PRECISION_HINT": "bf16"}
    pipeline = openvino_genai.ContinuousBatchingPipeline(model, scheduler, "CPU", properties)
    numbers = itertools.count()

    def run(prompts: Prompts, answer_len: int, clock: Clock) -> None:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = answer_len, True, False
        tensors = [openvino.Tensor(np.array([ids], np.int64)) for ids in prompts]
        clock.start(len(prompts))
        handles = [pipeline.add_request(next(numbers), tensor, config) for tensor in tensors]
        while pipeline.has_non_finished_requests():
            pipeline.step()
            for index, handle in enumerate(handles):
                if handle.can_read():
                    clock.tick(index, sum(len(output.generated_ids) for output in handle.read().values()))

    measure(run)


if __name__ == "__main__":
    main(*sys.argv[1:])
