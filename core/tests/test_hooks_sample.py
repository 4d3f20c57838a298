import io
import itertools
import json
import sys
from pathlib import Path

import pluggy
import pytest
import torch
from torch import nn

from core_plugin.builtin.text import Text
from core_plugin.testing.children import run_script
from core_plugin.types import HookPlugin, Run
from core_plugin.types.hook import Events

SCRIPT = Path(__file__).with_name("hooks_process.py")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """Bytes and the end of a text: 257 tokens, none of them a merge."""
    path = tmp_path_factory.mktemp("corpus") / "corpus.txt"
    path.write_text("abc")
    return Text.tokenizer(Text.Params(path=str(path), vocabulary_size=257))


class Fixed(nn.Module):
    """Gives the logits of a table for each token, and keeps what it was asked."""

    def __init__(self, table):
        super().__init__()
        self.table = nn.Parameter(table)
        self.dropout = nn.Dropout(0.5)
        self.asked = []

    def forward(self, input_ids):
        self.asked.append((input_ids, self.training, torch.is_grad_enabled()))
        return self.dropout(self.table[input_ids])


def follows(tokenizer, pairs):
    """A model that is certain of the next character."""
    table = torch.zeros(257, 257)
    for this, following in pairs:
        table[tokenizer.token_to_id(this), tokenizer.token_to_id(following)] = 50.0
    return Fixed(table)


@pytest.fixture
def alphabet(tokenizer):
    letters = "abcdefghijklmnopqrstuvwxyz"
    return follows(tokenizer, [*itertools.pairwise(letters), ("<|endoftext|>", "h")])


def sampled(directory, model, tokenizer, step=7, **config):
    run = Run(directory, {}, 0, 1, step, 0, model, torch.device("cpu"), tokenizer, step=step)
    route = HookPlugin("sample")
    manager = pluggy.PluginManager("core_plugin")
    manager.add_hookspecs(Events)
    manager.register(route(route.parse_params(config, route.params_type()), run))
    manager.check_pending()
    manager.hook.on_end(run=run)
    return records(directory)[-1]["text"]


def records(directory):
    lines = (directory / "samples.jsonl").read_text("utf-8").splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("temperature", [0.0, 5e-324, 0.8])
def test_a_prompt_is_continued(tmp_path, alphabet, tokenizer, capsys, temperature):
    sampled(tmp_path, alphabet, tokenizer, prompt="xyabc", tokens=4, temperature=temperature)
    assert records(tmp_path) == [{"step": 7, "prompt": "xyabc", "text": "defg"}]
    assert capsys.readouterr().out == "sample at step 7:\nxyabcdefg\n"


def test_without_a_prompt_a_new_text_begins(tmp_path, alphabet, tokenizer):
    assert sampled(tmp_path, alphabet, tokenizer, tokens=3) == "hij"


def test_the_model_gets_the_last_tokens_in_evaluation_without_gradients(
    tmp_path, alphabet, tokenizer
):
    alphabet.train()
    sampled(tmp_path, alphabet, tokenizer, prompt="abc", tokens=4, context=5, temperature=0.0)
    texts = [tokenizer.decode(ids[0].tolist()) for ids, _, _ in alphabet.asked]
    assert texts == ["abc", "abcd", "abcde", "bcdef"]
    assert {(t, g) for _, t, g in alphabet.asked} == {(False, False)}
    assert alphabet.training
    assert torch.is_grad_enabled()


def test_the_mode_is_restored_after_an_error_too(tmp_path, alphabet, tokenizer):
    alphabet.train()
    alphabet.register_forward_pre_hook(lambda module, inputs: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        sampled(tmp_path, alphabet, tokenizer)
    assert alphabet.training


def test_the_seed_decides_and_the_other_random_numbers_are_left_alone(tmp_path, tokenizer):
    model = Fixed(torch.zeros(257, 257))
    before = torch.get_rng_state()
    first, again, other = (sampled(tmp_path, model, tokenizer, seed=seed) for seed in (1, 1, 2))
    assert first == again != other
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("config", "shares"),
    [
        ({"temperature": 1.0, "top_k": None}, {"a": 0.6, "b": 0.3, "c": 0.1}),
        ({"temperature": 0.5, "top_k": 999}, {"a": 36 / 46, "b": 9 / 46, "c": 1 / 46}),
        ({"temperature": 1.0, "top_k": 2}, {"a": 2 / 3, "b": 1 / 3}),
        ({"temperature": 2.0, "top_k": 1}, {"a": 1.0}),
    ],
)
def test_tokens_come_as_often_as_they_are_likely(tmp_path, tokenizer, config, shares):
    logits = torch.full((257,), -torch.inf)
    for letter, share in {"a": 0.6, "b": 0.3, "c": 0.1}.items():
        logits[tokenizer.token_to_id(letter)] = torch.tensor(share).log()
    model = Fixed(logits.expand(257, 257).clone())
    text = sampled(tmp_path, model, tokenizer, tokens=4000, context=1, **config)
    assert {letter: text.count(letter) / 4000 for letter in sorted(set(text))} == {
        letter: pytest.approx(share, abs=0.03) for letter, share in shares.items()
    }


def test_the_terminal_is_not_steered_but_the_file_has_the_text(tmp_path, tokenizer, monkeypatch):
    stdout = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stdout)
    # In a byte-level vocabulary "ě" is the byte 27, which starts a terminal's control sequence.
    model = follows(tokenizer, [("a", "ě"), ("ě", "Ċ"), ("Ċ", "b")])
    text = sampled(tmp_path, model, tokenizer, prompt="ßa", tokens=3, temperature=0.0)
    assert text == "\x1b\nb"
    assert stdout.buffer.getvalue() == b"sample at step 7:\n?a?\nb\n"


def test_a_step_has_one_sample_and_earlier_ones_are_kept(tmp_path, alphabet, tokenizer):
    for step, prompt in [(7, "a"), (9, "b"), (9, "c")]:
        sampled(tmp_path, alphabet, tokenizer, step, prompt=prompt, tokens=1)
    assert [(r["step"], r["prompt"], r["text"]) for r in records(tmp_path)] == [
        (7, "a", "b"),
        (9, "c", "d"),
    ]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tokens", 0),
        ("top_k", 0),
        ("context", 0),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("seed", -1),
    ],
)
def test_a_value_out_of_range_is_named(field, value):
    with pytest.raises(ValueError, match=rf"{field} must .*got {value}"):
        HookPlugin("sample").params_type()(**{field: value})


def test_two_processes_sample_what_one_does(tmp_path, tokenizer):
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    printed = run_script(SCRIPT, "sample", tmp_path)
    (alone,) = records(tmp_path / "alone")
    assert len(set(alone["text"])) >= 6
    assert records(tmp_path / "fsdp2") == records(tmp_path / "ddp") == [alone]
    before, *samples = printed.split("sample at step 3:\nonce")
    assert (before, len(samples), len({*samples})) == ("", 3, 1)
