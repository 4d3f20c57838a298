"""Fingerprints: equal for equal code, wherever it is, and not otherwise."""

import json
from dataclasses import dataclass

import pytest

from core_plugin import config, provenance
from core_plugin.types import HookPlugin

pytestmark = pytest.mark.torchfree

RUN = {"data": {"name": "text", "path": "x"}, "hooks": [], "train": {"steps": 1}}
CODE = "def hook(params, run): ...\n"
PACKAGE = {
    "acme/__init__.py": "",
    "acme/entry.py": CODE,
    "acme/heavy.py": "VALUE = 1\n",
    "acme/table.json": "{}",
}


def fingerprint(name: str = "acme") -> provenance.Fingerprint:
    run = config.resolve(RUN | {"hooks": [name]})
    (mark,) = (mark for mark in provenance.fingerprints(run) if mark.slot == "hooks")
    return mark


def installed(environment, name: str, version="1.0", **changes: str) -> provenance.Fingerprint:
    """The fingerprint of the package, installed into a directory of its own."""
    import sys

    for module in [m for m in sys.modules if m.partition(".")[0] == "acme"]:
        del sys.modules[module]
    modules = PACKAGE | {f"acme/{file.replace('__', '.')}": text for file, text in changes.items()}
    environment.site(name).add("acme", version, hook="acme = acme.entry:hook", modules=modules)
    return fingerprint()


def test_every_plugin_of_a_run_has_a_fingerprint() -> None:
    run = config.resolve(RUN | {"hooks": ["jsonl", "progress", "jsonl"]})
    marks = provenance.fingerprints(run)
    assert [(m.slot, m.name) for m in marks] == [
        ("model", "decoder"),
        ("data", "text"),
        ("optimizer", "adamw"),
        ("scheduler", "constant"),
        ("distributed", "none"),
        ("device", "auto"),
        ("hooks", "jsonl"),
        ("hooks", "progress"),
        ("hooks", "jsonl"),
        ("launcher", "local"),
    ]
    assert {m.distribution for m in marks} == {"core-plugin"}
    assert {m.digest for m in marks} != {"unknown"}


def test_one_wheel_in_two_directories_has_one_fingerprint(environment) -> None:
    first = installed(environment, "one")
    second = installed(environment, "two")
    assert first == second
    assert (first.distribution, first.version) == ("acme", "1.0")
    assert len(first.digest) == 16


@pytest.mark.parametrize(
    "changes",
    [
        {"heavy__py": "VALUE = 2\n"},
        {"table__json": "[]"},
        {"new__py": ""},
        {"entry__py": CODE + "#"},
    ],
)
def test_other_code_has_another_fingerprint(environment, changes) -> None:
    assert installed(environment, "one").digest != installed(environment, "two", **changes).digest


def test_a_file_that_was_changed_after_the_installation_counts(environment) -> None:
    before = installed(environment, "one")
    copy = environment.site("two")
    copy.add("acme", hook="acme = acme.entry:hook", modules=PACKAGE)
    (copy.path / "acme/heavy.py").write_text("VALUE = 3\n")
    assert fingerprint().digest != before.digest
    (copy.path / "acme/heavy.py").write_text(PACKAGE["acme/heavy.py"])


def test_what_this_python_compiled_does_not_count(environment) -> None:
    first = installed(environment, "one")
    site = environment.site("two")
    info = site.add("acme", hook="acme = acme.entry:hook", modules=PACKAGE)
    (site.path / "acme/__pycache__").mkdir()
    (site.path / "acme/__pycache__/entry.cpython-311.pyc").write_bytes(b"\0")
    with (info / "RECORD").open("a") as record:
        record.write("acme/__pycache__/entry.cpython-311.pyc,,\nacme-1.0.dist-info/RECORD,,\n")
        record.write("../../bin/acme,sha256=x,3\n")
    assert fingerprint() == first


def in_place(environment, name: str, **changes: str) -> provenance.Fingerprint:
    """The fingerprint of a package whose source is not in the site directory."""
    import sys

    for module in [m for m in sys.modules if m.partition(".")[0] == "acme"]:
        del sys.modules[module]
    source = environment.site(f"{name}-source")
    source.add(
        "unused", modules=PACKAGE | {f"acme/{f.replace('__', '.')}": t for f, t in changes.items()}
    )
    site = environment.site(name)
    finder = {"__editable___acme_finder.py": f"# {name}"}
    info = site.add("acme", hook="acme = acme.entry:hook", modules=finder)
    (info / "direct_url.json").write_text(
        json.dumps({"url": "file:///x", "dir_info": {"editable": True}})
    )
    return fingerprint()


def test_an_editable_installation_is_known_by_its_source(environment) -> None:
    first = in_place(environment, "one")
    assert first == in_place(environment, "two")
    assert first.digest != in_place(environment, "three", heavy__py="VALUE = 2\n").digest
    assert first == in_place(environment, "four", __left_by_an_editor="x")


def test_the_same_code_has_one_digest_installed_and_in_place(environment) -> None:
    assert installed(environment, "one").digest == in_place(environment, "two").digest


@dataclass(frozen=True)
class Params: ...


def test_a_plugin_of_the_process_is_known_by_its_module(environment) -> None:
    site = environment.site()
    for name, code in (("proc_a", CODE), ("proc_b", CODE), ("proc_c", CODE + "#")):
        site.add(name, modules={f"{name}.py": code})
        HookPlugin(name).register(override=True)(__import__(name).hook)
    marks = {name: fingerprint(name) for name in ("proc_a", "proc_b", "proc_c")}
    assert {(m.distribution, m.version) for m in marks.values()} == {(None, None)}
    assert len({m.digest for m in marks.values()} - {"unknown"}) == 3


def test_code_without_a_source_is_unknown(environment) -> None:
    code = (
        "from core_plugin import config, provenance\nfrom core_plugin.types import HookPlugin\n"
        "@HookPlugin('typed').register()\ndef typed(params, run): ...\n"
        f"run = config.resolve({RUN | {'hooks': ['typed']}!r})\n"
        "print(*(m.digest for m in provenance.fingerprints(run) if m.slot == 'hooks'))\n"
    )
    assert environment.output(code) == "unknown\n"


def test_a_qualified_name_is_the_same_identity(environment) -> None:
    plain = installed(environment, "one")
    qualified = fingerprint("acme:acme")
    assert plain.identity == qualified.identity == ("hooks", "acme", "acme")
    assert plain.digest == qualified.digest
    assert plain != qualified
