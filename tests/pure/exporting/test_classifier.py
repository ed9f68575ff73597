"""Checkpoints that score texts: what their head makes of a prompt, offline and beside the graph."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from engine.errors import InvalidRequest
from engine.exporting.classifier import FILE, load_classifier
from engine.exporting.export import TABLE, ExportOptions, export
from engine.llm import LLM
from engine.models.config_fields import ModelError
from engine.serving.input_processor import InputProcessor
from engine.settings.config import Config
from engine.text.tokenizer import Tokenizer
from engine.wire import parse_request
from tests.checkpoints import FAMILIES, SEEDS, make_checkpoint, random_tensors, write_tensors
from tests.golden_arrays import golden
from tests.pure.service_fakes import an_input_processor

ROOT = Path(__file__).resolve().parents[3]
HEAD = np.random.default_rng(3).standard_normal((2, 64)).astype(np.float32)


def a_classifier(directory, head=HEAD, **keys):
    """Make a classifier as transformers stores it: without an output table, whatever config.json says about it."""
    make_checkpoint(directory, "qwen3", architectures=["Qwen3ForSequenceClassification"], **keys)
    config = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 150, "num_attention_heads": 4}
    config |= {"num_key_value_heads": 2, "torch_dtype": "float32"} | FAMILIES["qwen3"]
    tensors = dict(random_tensors(config, SEEDS["qwen3"]))
    write_tensors(directory / "model.safetensors", tensors | ({} if head is None else {"score.weight": head}))
    return directory, tensors


def test_a_classifier_scores_as_transformers_does_and_writes_no_answer(tmp_path):
    """There, the scores are the head times the hidden state of the last token: the golden one."""
    directory, _ = a_classifier(tmp_path / "model", tie_word_embeddings=False)
    llm = LLM(directory, export_cache_dir=str(tmp_path), block_bs=1)
    prompt = golden("qwen3")["prompt_65"].tolist()
    hidden = golden("prompt_outputs")["qwen3_last"]
    whole, cut, same, last = llm.generate(
        [
            {"input_ids": prompt, "pooling": "score"},
            {"input_ids": [7, *prompt], "pooling": "score", "truncate_prompt_tokens": 65},
            {"text": "ab", "text_pair": "ba", "pooling": "score"},
            {"input_ids": prompt, "pooling": "last"},
        ],
        progress=False,
    )
    np.testing.assert_allclose(whole.embedding, HEAD @ hidden, rtol=0, atol=1e-3)
    assert cut.embedding == whole.embedding and cut.prompt_token_ids == prompt
    assert same.prompt_token_ids == llm.tokenizer.encode("ab") + llm.tokenizer.encode("ba")
    np.testing.assert_allclose(last.embedding, hidden, rtol=0, atol=1e-4)
    with pytest.raises(InvalidRequest, match="This model scores prompts and writes no answers"):
        llm.generate("ab", progress=False)
    with pytest.raises(InvalidRequest, match="`text_pair` needs `text`, and `pooling` to be `score`"):
        llm.generate({"text": "ab", "text_pair": "ba"}, progress=False)
    llm.close()


@pytest.mark.slow
def test_two_tokens_of_which_one_agrees_score_with_a_model_that_was_made_to_write(tmp_path):
    """vLLM scores like this with Qwen3-Reranker: the probability of the second token if the next token is one of
    both.
    """
    directory, prompt = make_checkpoint(tmp_path / "model", "qwen3"), golden("qwen3")["prompt_65"].tolist()
    asked = {"classifier_from_token": ["b", "a"], "is_original_qwen3_reranker": True}
    llm = LLM(directory, export_cache_dir=str(tmp_path), block_bs=1, hf_overrides=json.dumps(asked))
    token_ids = [llm.tokenizer.encode(text, add_special_tokens=False)[0] for text in "ba"]
    [scored] = llm.generate({"input_ids": prompt, "pooling": "score"}, progress=False)
    assert InputProcessor.load(Config(), next(tmp_path.glob("model-*")), llm.tokenizer).joins_pairs
    llm.close()
    plain = LLM(directory, export_cache_dir=str(tmp_path), block_bs=1)
    said = [{"input_ids": [*prompt, each], "max_dec_len": 0, "prompt_logprobs": 0} for each in token_ids]
    no, yes = np.exp([each.prompt_logprobs[-1].chosen for each in plain.generate(said, progress=False)])
    plain.close()
    assert 1 / (1 + np.exp(-scored.embedding[0])) == pytest.approx(yes / (no + yes), abs=1e-4)


def test_the_head_may_be_two_tokens_of_which_one_agrees(tmp_path, no_paddle):
    directory, tensors = a_classifier(tmp_path / "model", None, classifier_from_token=["b", "a"])
    export(directory, tmp_path / "graph", ExportOptions())
    no, yes = (Tokenizer.load(directory).encode(text, add_special_tokens=False)[0] for text in "ba")
    np.testing.assert_array_equal(load_classifier(tmp_path / "graph"), tensors[TABLE][[yes]] - tensors[TABLE][[no]])


@pytest.mark.parametrize(
    ("head", "keys", "message"),
    [
        (HEAD[:, 1:], {}, r"tensor score.weight has shape \(2, 63\), config.json asks for rows of 64"),
        (None, {"classifier_from_token": ["no, never", "a"]}, "classifier_from_token is .* two texts of one token"),
        (None, {"classifier_from_token": ["a"]}, "classifier_from_token is .* two texts of one token"),
    ],
)
def test_a_head_that_cannot_be_is_refused(head, keys, message, tmp_path, no_paddle):
    directory, _ = a_classifier(tmp_path / "model", head, **keys)
    with pytest.raises(ModelError, match=message):
        export(directory, tmp_path / "graph", ExportOptions())


@pytest.mark.parametrize("text", ["{", "[1]"])
def test_overrides_that_are_no_object_are_refused(text):
    with pytest.raises(ModelError, match="hf_overrides is .* it must be a JSON object"):
        ExportOptions(hf_overrides=text)


def test_other_checkpoints_have_none(a_checkpoint, tmp_path, no_paddle):
    export(a_checkpoint, tmp_path / "graph", ExportOptions())
    assert load_classifier(tmp_path / "graph") is None and not (tmp_path / "graph" / FILE).exists()


def test_a_chat_template_that_knows_query_and_document_writes_the_pair(tmp_path):
    directory = make_checkpoint(tmp_path / "model", "qwen2")
    assert not Tokenizer.load(directory).writes_pairs
    (directory / "chat_template.jinja").write_text(
        "{{ messages | selectattr('role', 'eq', 'query') | map(attribute='content') | first }} ? "
        "{{ messages | selectattr('role', 'eq', 'document') | map(attribute='content') | first }} !"
    )
    tokenizer = Tokenizer.load(directory)
    processor = an_input_processor(tokenizer, 320, (99, 40, 9), classifier=HEAD)
    asked = {"req_id": "a", "text": "ab", "text_pair": "ba", "pooling": "score"}
    assert processor.process(parse_request(asked)).token_ids == tokenizer.encode("ab ? ba !", add_special_tokens=False)
    with pytest.raises(InvalidRequest, match="exceeds the limit MAX_SEQ_LEN"):
        processor.process(parse_request({**asked, "text_pair": "b" * 60}))
    instructed = {"chat_template_kwargs": {"instruction": "i"}}
    assert processor.process(parse_request({**asked, **instructed})).token_ids
    demo = Tokenizer.load(ROOT / "demo_model")
    joining = replace(processor, tokenizer=demo, vocab_size=2048, joins_pairs=True)
    joined = joining.process(parse_request({**asked, "text": "Par", "text_pair": "is"})).token_ids
    assert joined == demo.encode("Paris") != demo.encode("Par", pair="is")
    with pytest.raises(InvalidRequest, match="`chat_template_kwargs` needs a chat template that writes pairs"):
        joining.process(parse_request({**asked, **instructed}))
    with pytest.raises(InvalidRequest, match="`pooling` is score, which needs a checkpoint with a head"):
        replace(processor, classifier=None).process(parse_request(asked))
