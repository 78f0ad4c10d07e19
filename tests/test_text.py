"""From rows to token ids and from texts to rewards: seams, BOS and EOS, chat templates, bad rows."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import BOS, EOS, SPECIAL, TEMPLATES, byte_tokenizer, tiny_model

import common
import sft

END = SPECIAL.index("<end>")
ROOT = Path(common.__file__).parent
CPU = torch.device("cpu")


def user(content, **more):
    return {"role": "user", "content": content, **more}


def assistant(content, **more):
    return {"role": "assistant", "content": content, **more}


CHAT = [user("q1"), assistant("a1"), user("q2"), assistant("a2")]


def text_of(tokenizer, ids):
    return tokenizer.decode(ids, skip_special_tokens=False)


def trained(tokenizer, row):
    """The trained stretches of a row as texts."""
    pieces, inside = [], False
    for token, is_trained in zip(row["input_ids"], row["mask"], strict=True):
        if is_trained:
            pieces[-1:] = [[*pieces[-1], token]] if inside else [*pieces[-1:], [token]]
        inside = is_trained
    return [text_of(tokenizer, piece) for piece in pieces]


def encode(rows, tokenizer, stops=(EOS,), **flags):
    return sft.encode(rows, tokenizer, list(stops), sft.Args(**flags), "rows")


# ---------------------------------------------------------------------------------------------- prompt and response


def test_prompt_and_response_are_tokenised_apart_so_that_no_merge_crosses_the_seam():
    tokenizer = byte_tokenizer(merges=(("a", "b"),))
    x, a, b, c = tokenizer.convert_tokens_to_ids(list("xabc"))
    assert len(tokenizer("xabc").input_ids) == 3  # x, ab, c: a merge is there to be made
    assert common.prompt_token_ids(tokenizer, "xa") == [x, a]
    assert common.completion_token_ids(tokenizer, "bc", [EOS]) == [b, c, EOS]
    (row,) = encode([{"prompt": "xa", "completion": "bc"}], tokenizer)
    assert row["input_ids"] == [x, a, b, c, EOS] and row["mask"] == [False, False, True, True, True]


def test_no_merge_crosses_the_seam_of_a_conversation():
    template = "{% for m in messages %}{{ 'xa' if m.role == 'assistant' else 'u' }}{{ m.content }}"
    template += "{{ '<eos>' if m.role == 'assistant' else '' }}{% endfor %}{{ 'xa' if add_generation_prompt else '' }}"
    tokenizer = byte_tokenizer(merges=(("a", "b"),), template=template)
    x, a, b, c, u = tokenizer.convert_tokens_to_ids(list("xabcu"))
    (row,) = encode([{"messages": [user("c"), assistant("bc")]}], tokenizer)
    assert row["input_ids"] == [u, c, x, a, b, c, EOS]
    assert row["mask"] == [False] * 4 + [True] * 3


@pytest.mark.parametrize("completion", ["4", "4<eos>", "4<eos>\n", "4<eos>5<eos>"])
@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize("pad", ["<pad>", "<eos>"])
def test_a_plain_row_has_one_bos_if_any_and_trains_exactly_one_eos_the_last_token(completion, bos, pad):
    tokenizer = byte_tokenizer(bos=bos, pad=pad)
    (row,) = encode([{"prompt": "2+2=", "completion": completion}], tokenizer)
    assert text_of(tokenizer, row["input_ids"]) == "<bos>" * bos + "2+2=4<eos>"
    assert trained(tokenizer, row) == ["4<eos>"] and row["mask"][-1]


def test_a_second_stop_id_ends_a_response_as_well():
    tokenizer = byte_tokenizer()
    ids = common.completion_token_ids(tokenizer, "4<end>5<eos>", [EOS, END])
    assert text_of(tokenizer, ids) == "4<end>"
    assert text_of(tokenizer, common.completion_token_ids(tokenizer, "4<end>5", [EOS])) == "4<end>5<eos>"


def test_an_empty_completion_trains_the_eos_alone():
    tokenizer = byte_tokenizer()
    assert common.completion_token_ids(tokenizer, "", [EOS]) == [EOS]
    (row,) = encode([{"prompt": "2", "completion": ""}], tokenizer)
    assert row["input_ids"][-1] == EOS and row["mask"] == [False, True]


@pytest.mark.parametrize("prompt", ["hi", "<bos>hi"])
def test_a_plain_prompt_has_exactly_one_bos(prompt):
    ids = common.prompt_token_ids(byte_tokenizer(bos=True, template="bos"), prompt)
    assert ids.count(BOS) == 1 and ids[0] == BOS


def test_a_tokenizer_without_bos_puts_nothing_in_its_place(tokenizer):
    ids = common.prompt_token_ids(tokenizer, "hi")
    assert text_of(tokenizer, ids) == "hi" and None not in ids


def test_a_plain_prompt_does_not_go_through_the_chat_template():
    tokenizer = byte_tokenizer(bos=True, template="bos")
    assert text_of(tokenizer, common.prompt_token_ids(tokenizer, "hi")) == "<bos>hi"


def test_a_chat_prompt_has_the_bos_of_its_template_only_and_ends_in_the_generation_prompt():
    tokenizer = byte_tokenizer(bos=True, template="bos")
    ids = common.prompt_token_ids(tokenizer, [user("hi")])
    assert ids.count(BOS) == 1 and text_of(tokenizer, ids) == "<bos><u>hi</u><a>"
    (row,) = encode([{"messages": CHAT}], tokenizer)
    assert row["input_ids"].count(BOS) == 1 and row["input_ids"][0] == BOS


def test_right_padding_with_pad_equal_to_eos_keeps_every_trained_eos():
    rows = [
        {"input_ids": [4, 5, 6, 2], "mask": [False, True, True, True]},
        {"input_ids": [4, 7, 2], "mask": [False, True, True]},
    ]
    ids, attention, response = sft.tensors(rows, EOS, CPU)
    assert ids.tolist() == [[4, 5, 6, 2], [4, 7, 2, 2]]
    assert attention.tolist() == [[1, 1, 1, 1], [1, 1, 1, 0]]
    assert response.dtype == torch.bool and response.long().tolist() == [[0, 1, 1, 1], [0, 1, 1, 0]]
    assert (ids[response] == EOS).sum() == 2


@pytest.mark.parametrize("text", ["naïve café", "你好，世界", "🙂👍🏽", "１２３"])  # noqa: RUF001 (full-width digits)
def test_text_of_any_script_survives_encoding_and_decoding(tokenizer, text):
    ids = common.completion_token_ids(tokenizer, text, [EOS])
    assert common.decode(tokenizer, ids, [EOS]) == text
    assert len(ids) == len(text.encode()) + 1


# ---------------------------------------------------------------------------------------------------- conversations


@pytest.mark.parametrize(
    ("template", "stops", "turns"),
    [
        ("eos", [EOS], ["a1<eos>", "a2<eos>"]),
        ("bos", [EOS], ["a1<eos>", "a2<eos>"]),
        ("end", [EOS, END], ["a1<end>", "a2<end>"]),
        ("no stop", [EOS], ["a1</a><eos>", "a2</a><eos>"]),
    ],
)
def test_every_assistant_turn_trains_its_text_and_exactly_one_stop_id(template, stops, turns):
    tokenizer = byte_tokenizer(bos=template == "bos", template=template)
    (row,) = encode([{"messages": CHAT}], tokenizer, stops)
    assert trained(tokenizer, row) == turns  # not the header before it, not the newline after it
    assert row["mask"][-1] and len(row["input_ids"]) == len(row["mask"])


@pytest.mark.parametrize("template", ["eos", "bos", "end"])
def test_the_ids_of_a_conversation_are_its_rendered_text_up_to_the_last_stop_id(template):
    tokenizer = byte_tokenizer(bos=template == "bos", template=template)
    ids, _ = common.conversation_token_ids(tokenizer, [*CHAT, user("bye")], [EOS, END])
    rendered = tokenizer.apply_chat_template(CHAT, tokenize=False)
    assert text_of(tokenizer, ids) == rendered.rstrip("\n")


def test_what_stands_before_each_turn_is_what_generation_will_see():
    template = "{% for m in messages %}{{ 'A:' if m.role == 'assistant' else 'U:' }}{{ m.content }}"
    template += (
        "{{ '<eos>' if m.role == 'assistant' else '' }}\n{% endfor %}{{ 'A:' if add_generation_prompt else '' }}"
    )
    tokenizer = byte_tokenizer(merges=(("Ċ", "U"),), template=template)  # Ċ is the newline
    ids, mask = common.conversation_token_ids(tokenizer, CHAT, [EOS])
    begins = [t for t in range(1, len(mask)) if mask[t] and not mask[t - 1]]
    assert [ids[:t] for t in begins] == [common.prompt_token_ids(tokenizer, CHAT[:k]) for k in (1, 3)]


def test_assistant_turns_of_the_prompt_are_context(tokenizer):
    (row,) = encode([{"prompt": CHAT[:3], "completion": CHAT[3:]}], tokenizer)
    assert trained(tokenizer, row) == ["a2<eos>"]
    assert row["prompt_ids"] == row["input_ids"][: len(row["prompt_ids"])]
    (whole,) = encode([{"messages": CHAT}], tokenizer)
    assert row["input_ids"] == whole["input_ids"]


def test_a_completion_of_several_turns_trains_all_of_them(tokenizer):
    (row,) = encode([{"prompt": CHAT[:1], "completion": CHAT[1:]}], tokenizer)
    assert trained(tokenizer, row) == ["a1<eos>", "a2<eos>"]


def test_a_system_message_and_a_closing_user_message_are_not_trained(tokenizer):
    messages = [{"role": "system", "content": "s"}, *CHAT[:2], user("bye")]
    (row,) = encode([{"messages": messages}], tokenizer)
    assert text_of(tokenizer, row["input_ids"]) == "<u>s</u><u>q1</u><a>a1<eos>"
    assert trained(tokenizer, row) == ["a1<eos>"]


THINKING = [
    user("q1"),
    assistant("<think>x</think>a1"),
    user("a question of some length"),
    assistant("<think>y</think>a2"),
]


def test_a_row_that_the_template_prints_differently_later_is_dropped_and_counted_not_shifted(capsys):
    tokenizer = byte_tokenizer(template="unstable")
    rows = [{"messages": THINKING}, {"messages": THINKING[:2]}, {"messages": CHAT}]
    kept = encode(rows, tokenizer)
    assert [trained(tokenizer, row) for row in kept] == [["<think>x</think>a1<eos>"], ["a1<eos>", "a2<eos>"]]
    assert "1 of 3" in capsys.readouterr().out


def test_a_turn_that_does_not_begin_with_the_generation_prompt_is_dropped_and_counted(capsys):
    template = TEMPLATES["eos"].replace("%}<a>{% endif %}", "%}<a><think>{% endif %}")
    tokenizer = byte_tokenizer(template=template)
    assert text_of(tokenizer, common.prompt_token_ids(tokenizer, CHAT[:1])) == "<u>q1</u><a><think>"
    rows = [{"messages": CHAT[:2]}, {"messages": THINKING[:2]}]
    assert [trained(tokenizer, row) for row in encode(rows, tokenizer)] == [["x</think>a1<eos>"]]
    assert "1 of 2" in capsys.readouterr().out


@pytest.mark.parametrize("completion", ["<think>y</think>a2", "a2"])
def test_a_completion_with_or_without_thoughts_is_rendered_as_the_template_does(completion):
    tokenizer = byte_tokenizer(template="unstable")
    prompt = [*CHAT[:2], user("q2")]
    (row,) = encode([{"prompt": prompt, "completion": [assistant(completion)]}], tokenizer)
    rendered = tokenizer.apply_chat_template([*prompt, assistant(completion)], tokenize=False)
    assert text_of(tokenizer, row["input_ids"]) + "\n" == rendered
    assert trained(tokenizer, row) == [completion + "<eos>"]


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [user("nothing is answered")],
        [{"content": "no role"}],
        [user("q"), {"role": "assistant", "content": "refused"}],
    ],
)
def test_a_conversation_that_cannot_be_trained_on_is_dropped_and_does_not_end_the_run(messages):
    template = "{% if messages[-1].content == 'refused' %}{{ raise_exception('no') }}{% endif %}" + TEMPLATES["eos"]
    tokenizer = byte_tokenizer(template=template)
    (row,) = encode([{"messages": CHAT}, {"messages": messages}], tokenizer)
    assert row["messages"] is CHAT


def test_a_conversation_that_begins_with_the_assistant_trains_only_what_answers_a_message(tokenizer):
    rows = [{"messages": [assistant("welcome"), *CHAT]}, {"messages": CHAT}]
    assert [trained(tokenizer, row) for row in encode(rows, tokenizer)] == [["a1<eos>", "a2<eos>"]] * 2


def test_null_fields_of_a_message_do_not_reach_the_template():
    template = (
        "{% for m in messages %}{{ m.role }}:{{ m.content }}{% for k in m %}{% if k not in ('role', 'content') %}"
    )
    template += "[{{ k }}={{ m[k] }}]{% endif %}{% endfor %}<eos>{% endfor %}"
    template += "{% if add_generation_prompt %}assistant:{% endif %}"
    tokenizer = byte_tokenizer(template=template)
    messages = [user("q", name=None, tool_calls=None), assistant(None, name="bot", tool_calls=None)]
    before = json.dumps(messages)
    ids = common.prompt_token_ids(tokenizer, messages)
    assert text_of(tokenizer, ids) == "user:q<eos>assistant:[name=bot]<eos>assistant:"
    assert json.dumps(messages) == before


def test_conversations_need_a_chat_template(refused):
    for function, row in ((encode, {"messages": CHAT}), (encode, {"prompt": CHAT[:1], "completion": CHAT[1:2]})):
        assert "chat template" in refused(function, [row], byte_tokenizer())
    assert "chat template" in refused(common.encode_prompts, byte_tokenizer(), [{"prompt": CHAT[:1]}], "prompt", 100)


# ------------------------------------------------------------------------------------------------------- sft.encode


def test_max_length_cuts_the_response_and_adds_no_eos(tokenizer, capsys):
    rows = [{"prompt": "abc", "completion": "123456"}, {"prompt": "abc", "completion": "1"}]
    kept = encode(rows, tokenizer, max_length=6)
    assert [text_of(tokenizer, row["input_ids"]) for row in kept] == ["abc123", "abc1<eos>"]
    assert [sum(row["mask"]) for row in kept] == [3, 2]
    assert "1" in capsys.readouterr().out


def test_a_row_without_room_for_its_response_is_dropped_and_counted(tokenizer, capsys):
    rows = [{"prompt": "abcdefgh", "completion": "1"}, {"prompt": "abc", "completion": "1"}]
    (row,) = encode(rows, tokenizer, max_length=8)
    assert row["prompt"] == "abc"
    assert "1 of 2" in capsys.readouterr().out


def test_only_rows_without_room_end_the_run(tokenizer, refused):
    assert "--max-length 8" in refused(encode, [{"prompt": "abcdefghij", "completion": "123"}], tokenizer, max_length=8)


def test_a_row_needs_a_token_before_its_response(tokenizer):
    rows = [{"prompt": "", "completion": "1"}, {"prompt": "a", "completion": "1"}]
    assert [row["prompt"] for row in encode(rows, tokenizer)] == ["a"]
    with_bos = encode(rows, byte_tokenizer(bos=True))
    assert [row["prompt"] for row in with_bos] == ["", "a"] and with_bos[0]["input_ids"][0] == BOS


@pytest.mark.parametrize("gold", [0, 0.0, "0", 7])
def test_the_gold_answer_of_a_row_is_kept_zero_too(tokenizer, gold):
    (row,) = encode([{"prompt": "a", "completion": "#### 1", "answer": gold}], tokenizer)
    assert row["answer"] == gold and type(row["answer"]) is type(gold)


def test_the_columns_can_be_renamed(tokenizer):
    flags = {"prompt_column": "question", "answer_column": "answer"}
    (row,) = encode([{"question": "2+2=", "answer": "4"}], tokenizer, **flags)
    assert (row["prompt"], row["answer"], trained(tokenizer, row)) == ("2+2=", "4", ["4<eos>"])


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": "a"}, ["row 2", "completion"]),
        ({"prompt": None, "completion": "b"}, ["row 2", "prompt"]),
        ({"prompt": "a", "completion": None}, ["row 2", "completion"]),
        ({"prompt": "a", "completion": 4}, ["row 2", "completion"]),
        ({"prompt": 4, "completion": "b"}, ["row 2", "prompt"]),
        ({"prompt": "a", "completion": [assistant("b")]}, ["row 2"]),
        ({"prompt": [user("a")], "completion": "b"}, ["row 2"]),
    ],
)
def test_a_malformed_row_ends_the_run_with_its_number(tokenizer, refused, row, words):
    message = refused(encode, [{"prompt": "a", "completion": "b"}, row], tokenizer)
    assert all(word in message for word in words)


def test_messages_that_are_text_end_the_run_with_the_row(tokenizer, refused):
    assert "row 2" in refused(encode, [{"messages": CHAT}, {"messages": "hello"}], tokenizer)


@pytest.mark.parametrize("flag", ["prompt_column", "answer_column"])
def test_an_unknown_column_names_its_flag_and_the_columns_there_are(tokenizer, refused, flag):
    message = refused(encode, [{"prompt": "a", "completion": "b", "more": 1}], tokenizer, **{flag: "question"})
    assert f'--{flag.replace("_", "-")} "question"' in message and "prompt, completion, more" in message


# ---------------------------------------------------------------------------------------------------------- prompts


def test_prompts_longer_than_the_limit_are_dropped_whole_and_counted(tokenizer, capsys):
    rows = [
        {"q": "ab", "id": 0},
        {"q": "abcde", "id": 1},
        {"q": "", "id": 2},
        {"q": "abcd", "id": 3},
        {"q": [], "id": 4},
    ]
    kept = common.encode_prompts(tokenizer, rows, "q", 4)
    assert [row["id"] for row in kept] == [0, 3]
    assert [text_of(tokenizer, row["prompt_ids"]) for row in kept] == ["ab", "abcd"]
    assert [row["prompt"] for row in kept] == ["ab", "abcd"] and "prompt" not in rows[0]
    assert "3 of 5" in capsys.readouterr().out


def test_only_prompts_longer_than_the_limit_end_the_run(tokenizer, refused):
    assert "--max-prompt-length 4" in refused(common.encode_prompts, tokenizer, [{"prompt": "abcde"}], "prompt", 4)


def test_prompts_of_another_type_end_the_run_with_the_row(tokenizer, refused):
    assert "row 2" in refused(common.encode_prompts, tokenizer, [{"prompt": "a"}, {"prompt": 5}], "prompt", 4)
    assert "row 2" in refused(common.encode_prompts, tokenizer, [{"prompt": "a"}, {"prompt": None}], "prompt", 4)


# ----------------------------------------------------------------------------------------------------------- column


def test_column_reads_zero_and_the_empty_text_as_values():
    assert common.column([{"answer": ""}, {"answer": "0"}], "answer", "--answer-column") == ["", "0"]


@pytest.mark.parametrize("row", [{}, {"answer": None}])
def test_column_names_the_row_whose_value_is_missing_or_null(refused, row):
    message = refused(common.column, [{"answer": "1"}, {"answer": "2"}, row], "answer", "--answer-column")
    assert "row 3" in message and "--answer-column" in message


# -------------------------------------------------------------------------------------------------------- load_rows


def test_jsonl_rows_keep_their_order_and_blank_lines_are_skipped(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a", "n": 1}\n\n{"prompt": "b\u2028c"}\n', encoding="utf-8")
    assert common.load_rows(str(path), "train", "prompts") == [{"prompt": "a", "n": 1}, {"prompt": "b\u2028c"}]


TEXTS = ["naïve", "你好", "🙂", "１２"]  # noqa: RUF001 (full-width digits)


def test_a_file_is_read_as_utf8_whatever_the_locale(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": t}, ensure_ascii=False) + "\n" for t in TEXTS), encoding="utf-8")
    program = (
        "import common, sys; print(ascii([r['prompt'] for r in common.load_rows(sys.argv[1], 'train', 'prompts')]))"
    )
    env = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    out = subprocess.run([sys.executable, "-c", program, path], cwd=ROOT, env=env, capture_output=True, text=True)
    assert out.stdout.strip() == ascii(TEXTS), out.stderr


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{"prompt": "a"}\n{"prompt": \n', "line 2"),
        (b'{"prompt": "a"}\n5\n', "line 2"),
        ('{"prompt": "é"}\n'.encode("latin-1"), "rows.jsonl"),
        (b"", "no rows"),
        (b"\n\n", "no rows"),
    ],
)
def test_a_bad_jsonl_file_ends_the_run_with_its_name_and_line(tmp_path, refused, content, words):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    message = refused(common.load_rows, str(path), "train", "prompts")
    assert "rows.jsonl" in message and words in message


@pytest.mark.parametrize("name", ["none.jsonl", "none.parquet", "none"])
def test_a_missing_dataset_ends_the_run_with_its_name(tmp_path, refused, name):
    assert str(tmp_path / name) in refused(common.load_rows, str(tmp_path / name), "train", "prompts")


def test_an_unknown_split_ends_the_run_with_its_name(refused):
    assert '"validation"' in refused(common.load_rows, "toy", "validation", "prompts")


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.mark.usefixtures("own_cache")
def test_parquet_rows_with_fields_that_arrow_fills_with_null_give_the_ids_of_the_plain_rows(tmp_path, tokenizer):
    import pyarrow
    import pyarrow.parquet

    rows = [{"messages": [user("q", name="ann"), assistant("a")]}, {"messages": CHAT}]
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    read = common.load_rows(str(path), "train", "demonstrations")
    assert read[1]["messages"][0]["name"] is None  # what the test is about
    ids = [[row["input_ids"] for row in encode(some, tokenizer)] for some in (read, rows)]
    assert ids[0] == ids[1]


@pytest.mark.usefixtures("own_cache")
def test_a_directory_is_a_dataset_with_the_splits_of_its_file_names_and_is_read_again_when_it_changes(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    for split, prompts in (("train", ["a", "b"]), ("test", ["c"]), ("train", ["d", "e"])):
        (folder / f"{split}.jsonl").write_text("".join(json.dumps({"prompt": p}) + "\n" for p in prompts))
        assert [row["prompt"] for row in common.load_rows(str(folder), split, "prompts")] == prompts


# ------------------------------------------------------------------------------------------------------- tokenizers


def test_a_tokenizer_without_pad_token_pads_with_its_eos(tmp_path):
    byte_tokenizer(pad=None).save_pretrained(tmp_path)
    assert common.load_tokenizer(str(tmp_path)).pad_token_id == EOS


def test_a_tokenizer_without_eos_or_without_files_ends_the_run(tmp_path, refused):
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path / "saved")
    assert "EOS" in refused(common.load_tokenizer, str(tmp_path / "saved"))
    assert "--model" in refused(common.load_tokenizer, str(tmp_path / "none"))


@pytest.mark.parametrize(("own", "expected"), [([9, 5], [2, 5, 9]), (9, [2, 9]), (2, [2]), (None, [2])])
def test_stop_ids_are_those_of_the_generation_config_and_the_tokenizers_eos(tokenizer, model, own, expected):
    model.generation_config.eos_token_id = own
    assert common.stop_ids(tokenizer, model) == expected


# ----------------------------------------------------------------------------------------------------------- decode


@pytest.mark.parametrize(
    ("ids", "text"),
    [
        ("4<eos>", "4"),
        ("4<end>", "4"),
        ("4", "4"),
        ("<eos>", ""),
        ("", ""),
        ("<pad>4 5<eos>", "4 5"),
        ("a , b .", "a , b ."),
    ],
)
def test_decode_leaves_out_the_stop_id_and_other_special_tokens_and_nothing_else(tokenizer, ids, text):
    ids = common.plain_ids(tokenizer, ids)
    before = list(ids)
    assert common.decode(tokenizer, ids, [EOS, END]) == text and ids == before


def test_decode_drops_a_stop_id_that_is_no_special_token(tokenizer):
    newline = tokenizer("\n").input_ids[0]
    assert common.decode(tokenizer, tokenizer("4\n").input_ids, [EOS, newline]) == "4"


def test_half_a_character_becomes_a_replacement_mark_and_leaves_the_sampled_ids_alone(tokenizer):
    prompt, sampled = tokenizer("a").input_ids, tokenizer("é").input_ids[:1]
    assert common.decode(tokenizer, sampled, [EOS]) == "\ufffd"
    ids, _, response = common.collate([prompt], [sampled], 0, CPU)
    assert ids[response].tolist() == sampled


# ---------------------------------------------------------------------------------------------------------- rewards

REWARD_FILE = """
from __future__ import annotations
from dataclasses import dataclass
from functools import partial

@dataclass
class Limits:
    low: int = 1

def length(prompts, completions, **columns):
    return [len(c) for c in completions]

def at_least(prompts, completions, least, **columns):
    return [len(c) >= least for c in completions]

long_enough = partial(at_least, least=3)
not_a_function = 5
"""


@pytest.fixture
def reward_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(REWARD_FILE)
    (tmp_path / "broken.py").write_text("def f(:\n")
    (tmp_path / "notes.txt").write_text("f = print")
    return tmp_path / "mine.py"


@pytest.mark.usefixtures("reward_file")
def test_rewards_are_loaded_by_name_with_their_weights():
    specs = ["mine.py:length=0.5", "rewards.py:math_answer", "mine.py:long_enough=-2", "mine.py:at_least=0"]
    loaded = common.load_rewards(specs)
    assert {name: weight for name, (_, weight) in loaded.items()} == {
        "length": 0.5, "math_answer": 1.0, "long_enough": -2.0, "at_least": 0.0,
    }  # fmt: skip
    rows, texts = [{"prompt": "?", "answer": "4"}] * 2, ["#### 4", "5"]
    values = {n: common.call_reward(n, f, rows, texts).tolist() for n, (f, _) in loaded.items() if n != "at_least"}
    assert values == {"length": [6.0, 1.0], "math_answer": [1.0, 0.0], "long_enough": [1.0, 0.0]}


def test_a_reward_file_of_the_working_directory_comes_before_one_beside_the_scripts(reward_file):
    (reward_file.parent / "rewards.py").write_text("def math_answer(prompts, completions, **columns): return [7]")
    ((function, _),) = common.load_rewards(["rewards.py:math_answer"]).values()
    assert function(prompts=["?"], completions=["!"]) == [7]
    ((function, _),) = common.load_rewards([f"{reward_file}:length"]).values()
    assert function(prompts=["?"], completions=["four"]) == [4]


@pytest.mark.parametrize(
    ("specs", "words"),
    [
        (["mine.py:nothing"], "nothing"),
        (["mine.py:not_a_function"], "not_a_function"),
        (["none.py:length"], "none.py"),
        (["length"], "file.py:function"),
        (["mine.py"], "file.py:function"),
        (["mine.py:length=much"], "much"),
        (["mine.py:length=nan"], "nan"),
        (["mine.py:length", "mine.py:length=2"], "twice"),
        (["broken.py:f"], "broken.py"),
        (["notes.txt:f"], "notes.txt"),
    ],
)
@pytest.mark.usefixtures("reward_file")
def test_a_wrong_reward_flag_ends_the_run_with_what_is_wrong(refused, specs, words):
    assert words in refused(common.load_rewards, specs)


def test_a_reward_function_gets_the_columns_of_each_sample_and_the_conversation_where_the_prompt_is_one():
    seen = {}

    def spy(**arguments):
        seen.update(arguments)
        return [0.0, 1.0]

    rows = [
        {"prompt": "2+2=", "answer": "4", "prompt_ids": [1, 2]},
        {"prompt": [user("hi")], "answer": "5", "level": 3},
    ]
    common.call_reward("spy", spy, rows, ["four", "five"])
    assert seen["prompts"] == ["2+2=", [user("hi")]]
    assert seen["completions"] == ["four", [assistant("five")]]
    assert seen["answer"] == ["4", "5"] and seen["level"] == [None, 3]
    assert "prompt" not in seen and "completion" not in seen


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0.0, 1.0], [0.0, 1.0]),
        ([1, 0], [1.0, 0.0]),
        ([True, False], [1.0, 0.0]),
        ([None, 0.0], [math.nan, 0.0]),
        (torch.tensor([0.5, -1]), [0.5, -1.0]),
        ((x for x in (1, 2)), [1.0, 2.0]),
    ],
)
def test_rewards_become_float64_and_none_becomes_not_scored(values, expected):
    scores = common.call_reward("f", lambda **_: values, [{"prompt": "a"}] * 2, ["b", "c"])
    torch.testing.assert_close(scores, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    "values", [[1.0], [1.0, 2.0, 3.0], 5, None, ["right", "wrong"], [math.inf, 0.0], [[1.0], [2.0]]]
)
def test_a_reward_function_that_does_not_return_one_number_a_sample_stops_the_run_by_name(values):
    with pytest.raises(RuntimeError, match="too_few"):
        common.call_reward("too_few", lambda **_: values, [{"prompt": "a"}] * 2, ["b", "c"])


def test_a_reward_function_that_raises_stops_the_run_by_name():
    def careless(prompts, completions, **columns):
        return [1 / len(columns) for _ in zip(prompts, completions, strict=True)]

    with pytest.raises(RuntimeError, match=r"careless.*ZeroDivisionError"):
        common.call_reward("careless", careless, [{"prompt": "a"}], ["b"])


@pytest.mark.parametrize(
    ("scores", "weights", "expected"),
    [
        ([[1, 0], [math.nan, 1]], [1, 2], [1, 2]),
        ([[1], [1]], [0.2, 2], [2.2]),
        ([[math.nan, 0], [math.nan, math.nan]], [1, 1], [math.nan, 0]),
        ([[0, 1], [1, 0]], [0, -1], [-1, 0]),
        ([[math.nan, 3]], [1], [math.nan, 3]),
    ],
)
def test_the_reward_is_the_weighted_sum_of_those_that_scored(scores, weights, expected):
    scores = torch.tensor(scores, dtype=torch.float64)
    before = scores.clone()
    total = common.weighted_reward(scores, weights)
    torch.testing.assert_close(total, torch.tensor(expected, dtype=torch.float64), equal_nan=True)
    assert torch.equal(scores.nan_to_num(nan=-9), before.nan_to_num(nan=-9))


def test_prompt_answer_and_sample_stay_together_from_shuffled_rows_to_rewards(tokenizer):
    rows = [{"prompt": f"{k}+0=", "answer": str(k)} for k in range(10)]
    rows = common.encode_prompts(tokenizer, rows, "prompt", 20)
    ((function, _),) = common.load_rewards([f"{ROOT / 'rewards.py'}:math_answer"]).values()
    for step in range(4):
        batch = [rows[i] for i in common.data_order(10, 1, 6 * step, 6)]
        samples = [row for row in batch for _ in range(2)]
        echoed = [text_of(tokenizer, row["prompt_ids"]).split("+")[0] for row in samples]
        assert common.call_reward("math_answer", function, samples, echoed).tolist() == [1.0] * 12
    assert common.call_reward("math_answer", function, samples, echoed[2:] + echoed[:2]).mean() < 0.5


def test_tiny_models_read_what_the_tokenizer_writes(tokenizer):
    model = tiny_model(vocab_size=len(tokenizer))
    rows = encode([{"messages": CHAT}, {"messages": CHAT[:2]}], tokenizer)
    ids, attention, response = sft.tensors(rows, tokenizer.pad_token_id, CPU)
    assert common.token_logprobs(model, ids, attention, response).count_nonzero() == response.sum()
