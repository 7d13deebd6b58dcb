import subprocess
import sys

import pytest
import tensorflow_datasets as tfds

from harnessrl_jax.errors import TaskError
from harnessrl_jax.tasks import FactbookSource, JsonLinesSource, TfdsSource, heldout_tasks


def test_the_factbook_source_gives_the_default_questions():
    assert FactbookSource().tasks("heldout") == heldout_tasks()


def test_json_lines(tmp_path):
    (tmp_path / "qa.jsonl").write_text(
        '{"question": "Q1?", "answers": ["a", "b"]}\n\n{"question": "Q2?", "answer": "c", "id": "x", "hops": 2}\n'
    )
    source = JsonLinesSource(path="nowhere", heldout_path=tmp_path / "qa.jsonl")
    one, two = source.tasks("heldout")
    assert (one.task_id, one.question, one.answers, one.hops, one.split) == ("qa.1", "Q1?", ("a", "b"), 1, "heldout")
    assert (two.task_id, two.answers, two.hops) == ("x", ("c",), 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"qa.jsonl: no question in it"),
        ("{", r"qa.jsonl, line 1: not JSON .*wanted"),
        ("3", r"qa.jsonl, line 1: got a JSON int"),
        ('\n{"question": "Q"}', r"qa.jsonl, line 2: got the keys \['question'\]"),
        ('{"question": "Q", "answers": []}', r"line 1: got the keys"),
        ('{"question": "Q", "answers": [1]}', r"line 1: got the keys"),
        ('{"question": "", "answers": ["a"]}', r"line 1: got the keys"),
        ('{"id": 1, "question": "Q", "answer": "a"}\n' * 2, r"the id '1' is given twice"),
    ],
)
def test_bad_json_lines_say_where(tmp_path, text, message):
    (tmp_path / "qa.jsonl").write_text(text)
    with pytest.raises(TaskError, match=message):
        JsonLinesSource(path=tmp_path / "qa.jsonl").tasks("train")


def test_missing_files_say_so(tmp_path):
    with pytest.raises(TaskError, match=r"none.jsonl: no such file; wanted JSON lines"):
        JsonLinesSource(path=tmp_path / "none.jsonl").tasks("train")
    with pytest.raises(TaskError, match=r"no held-out questions; give heldout_path"):
        JsonLinesSource(path=tmp_path / "none.jsonl").tasks("heldout")


class MiniQa(tfds.core.GeneratorBasedBuilder):
    # As if defined in a notebook: TFDS then looks for no files beside this one.
    __module__ = "notebook"
    VERSION = tfds.core.Version("1.0.0")

    def _info(self):
        text = tfds.features.Text()
        answers = tfds.features.Sequence({"text": text})
        features = tfds.features.FeaturesDict({"question": text, "answers": answers, "answer": text})
        return tfds.core.DatasetInfo(builder=self, features=features)

    def _split_generators(self, dl_manager):
        return {"train": self._generate_examples(3), "validation": self._generate_examples(1)}

    def _generate_examples(self, count):
        for n in range(count):
            yield n, {"question": f"q{n}?", "answers": [{"text": f"a{n}"}, {"text": "ä"}], "answer": f"b{n}"}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tfds")
    MiniQa(file_format="array_record", data_dir=folder).download_and_prepare()
    return folder


def test_tfds(prepared):
    source = TfdsSource(name="mini_qa", answers="answers.text", heldout_split="validation", data_dir=prepared)
    assert sorted((task.question, task.answers) for task in source.tasks("train")) == [
        (f"q{n}?", (f"a{n}", "ä")) for n in range(3)
    ]
    (task,) = source.tasks("heldout")
    assert (task.task_id, task.split, task.question) == ("mini_qa.validation.0", "heldout", "q0?")
    (task,) = TfdsSource(name="mini_qa", answers="answer", heldout_split="validation", data_dir=prepared).tasks(
        "heldout"
    )
    assert task.answers == ("b0",)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "nowhere"}, r"TfdsSource 'nowhere', split 'train': cannot be read .*Prepare it"),
        ({"train_split": "dev"}, r"split 'dev': cannot be read \(ValueError: Unknown split 'dev'"),
        ({"answers": "reply"}, r"mini_qa.train.0: no field 'reply'; the fields are answer, answers, question"),
        ({"answers": "answer.text"}, r"no field 'answer.text'"),
        ({"question": "answers.text"}, r"2 questions in 'answers.text' and 2 answers"),
    ],
)
def test_tfds_errors(prepared, options, message):
    defaults = {"name": "mini_qa", "answers": "answers.text", "data_dir": prepared}
    with pytest.raises(TaskError, match=message):
        TfdsSource(**(defaults | options)).tasks("train")


def test_tfds_without_a_heldout_split_says_so():
    with pytest.raises(TaskError, match=r"no held-out split; give heldout_split"):
        TfdsSource(name="mini_qa").tasks("heldout")


def test_tfds_is_imported_only_where_it_is_used():
    script = "import sys; from harnessrl_jax.tasks import TfdsSource; print('tensorflow_datasets' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout == "False\n"
