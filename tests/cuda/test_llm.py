"""The offline engine on a GPU, with the bundled model."""

import pytest

torch = pytest.importorskip("torch", reason="torch is missing: pip install .[cuda]")

from engine.executors.cuda.executor import CudaExecutor  # noqa: E402
from engine.exporting.export import ExportOptions, export  # noqa: E402
from engine.llm import LLM  # noqa: E402
from tests.cuda.conftest import IS_INTERPRETED, ROOT  # noqa: E402

pytestmark = pytest.mark.skipif(IS_INTERPRETED, reason="the interpreter is too slow for it")


@pytest.fixture(scope="module")
def llm(device):
    """Return an LLM that sizes its cache by the free memory."""
    graph_dir = ROOT / "build/golden/demo"
    if not graph_dir.exists():
        export(ROOT / "demo_model", graph_dir, ExportOptions())
    llm = LLM(graph_dir, device="auto", batch_size=16, gpu_memory_utilization=0.3)
    yield llm
    llm.close()


def test_auto_takes_the_gpu_and_the_model_knows_what_it_learned(llm):
    assert isinstance(llm._loop.executor, CudaExecutor)
    prompts = ["What is the capital of France?", "What is 2 + 3?"]
    messages = [{"messages": [{"role": "user", "content": prompt}]} for prompt in prompts]
    answers = llm.generate(messages, {"max_dec_len": 16, "temperature": 0}, progress=False)
    assert "Paris" in answers[0].text
    assert "5" in answers[1].text
    assert [answer.finish_reason for answer in answers] == ["stop", "stop"]


def test_the_cache_is_no_larger_than_a_full_batch_can_use_and_stays_in_its_share(llm):
    assert llm._num_blocks == 16 * 4096 // 64
    assert torch.cuda.memory_reserved() < 0.3 * torch.cuda.get_device_properties().total_memory


def test_a_seed_gives_the_same_answer_again(llm):
    fields = {"max_dec_len": 24, "temperature": 1.5, "top_p": 0.95, "seed": 7}
    first, second = (llm.generate("The capital of", fields, progress=False)[0].token_ids for _ in range(2))
    assert first == second
    assert first != llm.generate("The capital of", {**fields, "seed": 8}, progress=False)[0].token_ids
