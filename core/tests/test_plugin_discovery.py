"""The scan: broken metadata costs what is broken, and is reported with its file and the fix."""

import os
import random
import re
import shutil
import sys
import zipfile

import importlib_metadata
import pytest

from core_plugin import discovery
from core_plugin.plugin import BasePlugin

pytestmark = pytest.mark.torchfree


class SamplerPlugin(BasePlugin): ...


MODULE = "def sample():\n    return __name__\n"


def found(*directories) -> dict[str, str | None]:
    """The names that a scan finds, and by what they are shadowed."""
    return {c.qualified_name: c.shadowed_by for c in scan(*directories).candidates}


def scan(*directories) -> discovery.Scan:
    path = [str(d) for d in directories]
    return discovery.scan_distributions(importlib_metadata.distributions(path=path))


def good(environment):
    site = environment.site("good")
    site.add("good", sampler="good = good_module:sample", modules={"good_module.py": MODULE})
    return site


BROKEN_ENTRY_POINTS = {
    "not_utf8": (b"[core_plugin.sampler]\nbad = caf\xe9:x\n", "entry_points.txt", "can't decode"),
    "no_equals": (b"[core_plugin.sampler]\n\nbad\n", "entry_points.txt:3", "'bad' has no '= mod"),
    "no_object": (b"[core_plugin.sampler]\nbad = module\n", "entry_points.txt:2", "no.* reference"),
    "no_reference": (b"[core_plugin.sampler]\nbad = a b:c\n", "entry_points.txt:2", "reference"),
    "version": (b"[core_plugin.sampler]\nbad = x>=1\n", "entry_points.txt:2", "'x>=1' is not an"),
    "bad_name": (
        b"[core_plugin.sampler]\na:b = m:o\n",
        "entry_points.txt:2",
        "not a plugin's name",
    ),
    "empty": (
        b"[core_plugin.sampler]\nbad =\n",
        "entry_points.txt:2",
        "is not an object reference",
    ),
}


@pytest.mark.parametrize("case", BROKEN_ENTRY_POINTS)
def test_broken_entry_points_cost_themselves_alone(environment, command_line, case) -> None:
    content, where, message = BROKEN_ENTRY_POINTS[case]
    site = good(environment)
    content += b"\n# after it\n; comments\n[core_plugin.sampler]\nkept = good_module:sample\n"
    info = site.add("bad", entry_points=content)
    assert SamplerPlugin("good")() == "good_module"
    assert SamplerPlugin.names() == (["good"] if case == "not_utf8" else ["good", "kept"])
    (problem,) = discovery.scan().problems
    assert problem.location == str(info / where)
    code, out, _ = command_line("doctor")
    assert code == 1
    assert f"\n{info / where}\n" in out
    assert "\n  fix: " in out
    assert re.search(message, out)


def test_of_a_name_that_is_there_twice_the_first_counts(environment) -> None:
    site = environment.site()
    info = site.add("twice", sampler="x = good_module:sample\nx = other:sample")
    (site.path / "good_module.py").write_text(MODULE)
    assert SamplerPlugin("x")() == "good_module"
    (problem,) = discovery.scan().problems
    assert problem.location == f"{info / 'entry_points.txt'}:3"
    assert "'x' is there twice" in problem.message


def test_broken_metadata_of_other_packages_are_not_even_read(environment) -> None:
    site = good(environment)
    site.add("unrelated", entry_points=b"[console_scripts]\nbad\n")
    site.add("binary", entry_points=b"[console_scripts]\nx = m:o\n").joinpath(
        "METADATA"
    ).write_bytes(b"\xff\xfe")
    site.add("empty", metadata=False)
    assert found(site.path) == {"good:good": None}
    assert scan(site.path).problems == ()


@pytest.mark.parametrize("content", [None, b"", b"Name: \xff\n", b"Version: 1.0\n"])
def test_entry_points_without_metadata_are_reported(environment, content) -> None:
    site = good(environment)
    info = site.add("bad", sampler="bad = m:o", metadata=False)
    if content is not None:
        (info / "METADATA").write_bytes(content)
    assert found(site.path) == {"good:good": None}
    (problem,) = scan(site.path).problems
    assert problem.location == str(info)
    assert "no readable METADATA" in problem.message
    assert problem.fix == "remove the directory and re-install bad"


def test_a_version_that_is_none_is_reported(environment) -> None:
    site = good(environment)
    info = site.add("bad", "one", sampler="bad = m:o")
    assert found(site.path) == {"good:good": None}
    assert [(p.location, "'one'" in p.message) for p in scan(site.path).problems] == [
        (str(info), True)
    ]


@pytest.mark.parametrize("left_over", ["good-0.9.dist-info", "good-1.1.dist-info", "good.egg-info"])
@pytest.mark.parametrize("place", ["the same", "an earlier", "a later"])
def test_an_empty_left_over_hides_nothing(environment, left_over, place) -> None:
    site = good(environment)
    other = site if place == "the same" else environment.site("other")
    empty = other.add("good", metadata=False, info=left_over)
    path = [other.path, site.path] if place == "an earlier" else [site.path, other.path]
    assert found(*path) == {"good:good": None}
    (problem,) = scan(*path).problems
    assert (problem.location, problem.fix) == (str(empty), "remove the directory")


def test_a_stale_egg_info_before_the_real_one_is_reported_with_the_fix(environment) -> None:
    site = good(environment)
    source = environment.site("source")
    info = source.add("good", "0.5", info="good.egg-info", metadata=False)
    (info / "PKG-INFO").write_text("Metadata-Version: 1.0\nName: good\nVersion: 0.5\n")
    ((_, shadowed_by),) = found(source.path, site.path).items()
    assert shadowed_by == str(info)
    (problem,) = scan(source.path, site.path).problems
    assert problem.location == str(site.path / "good-1.0.dist-info")
    assert f"remove {info} or take its directory off the path" in problem.fix
    assert found(site.path, source.path) == {"good:good": None}


def test_the_egg_info_beside_the_sources_of_an_editable_installation_is_no_problem(
    environment,
) -> None:
    """setuptools leaves one, and puts the sources on the path after the installed metadata."""
    site = good(environment)
    source = environment.site("source")
    info = source.add("good", info="good.egg-info", metadata=False, sampler="good = good:Good")
    (info / "PKG-INFO").write_text("Metadata-Version: 1.0\nName: good\nVersion: 1.0\n")
    same = (site.path / "good-1.0.dist-info" / "entry_points.txt").read_text()
    (info / "entry_points.txt").write_text(same)
    assert found(site.path, source.path) == {"good:good": None}
    assert scan(site.path, source.path).problems == ()
    (info / "entry_points.txt").write_text(same + "other = good:Other\n")
    assert len(scan(site.path, source.path).problems) == 1


def test_an_egg_info_on_pythonpath_declares_plugins(environment) -> None:
    source = environment.site("source")
    info = source.add("acme", info="acme.egg-info", metadata=False, sampler="x = m:o")
    (info / "PKG-INFO").write_text("Metadata-Version: 1.0\nName: acme\nVersion: 0.5\n")
    (info / "requires.txt").write_text("core-plugin<9\n\n[torch]\ntorch<1\n")
    (candidate,) = scan(source.path).candidates
    assert candidate.distribution.version == "0.5"
    assert discovery.incompatibility(candidate.distribution) is None


@pytest.mark.parametrize(("older", "newer"), [("1.9", "1.10"), ("1.0", "2.0"), ("2.0rc1", "2.0")])
def test_of_two_versions_in_one_directory_the_newer_is_used(environment, older, newer) -> None:
    site = environment.site()
    old = site.add("acme", older, sampler="x = old:o\ngone = old:o")
    new = site.add("acme", newer, sampler="x = new:o")
    candidates = scan(site.path).candidates
    assert {(c.name, c.value, c.shadowed_by) for c in candidates} == {
        ("x", "new:o", None),
        ("x", "old:o", str(new)),
        ("gone", "old:o", str(new)),
    }
    assert {(p.location, p.fix) for p in scan(site.path).problems} == {
        (str(old), f"remove {old}, which is left over from another version")
    }
    assert SamplerPlugin.names() == ["x"]


def test_a_directory_that_is_reached_twice_counts_once(environment) -> None:
    site = good(environment)
    link = environment.root / "link"
    link.symlink_to(site.path)
    dotted = site.path / ".." / "good"
    assert found(site.path, link, dotted, site.path) == {"good:good": None}
    assert scan(link, site.path, dotted).problems == ()
    environment.use(link, dotted)
    assert SamplerPlugin("good")() == "good_module"


@pytest.mark.parametrize(
    ("info", "name"),
    [
        ("good-extra.egg-info", "good-extra"),
        ("good-2fast.egg-info", "good-2fast"),
        ("Good.Extra-1.0-py3.11.egg-info", "Good.Extra"),
        ("good-extra-1.0-py3.11-linux-x86_64.egg-info", "good-extra"),
        ("good-extra-1.0.dist-info", "good-extra"),
    ],
)
def test_a_directory_name_that_is_not_escaped_is_no_other_distribution(
    environment, info, name
) -> None:
    site = environment.site()
    for one, directory, plugin in (("good", "good.egg-info", "good"), (name, info, "extra")):
        path = site.add(one, info=directory, metadata=False, sampler=f"{plugin} = m:o")
        file = "METADATA" if directory.endswith("dist-info") else "PKG-INFO"
        (path / file).write_text(f"Metadata-Version: 1.0\nName: {one}\nVersion: 1.0\n")
    canonical = name.lower().replace(".", "-")
    assert found(site.path) == {"good:good": None, f"{canonical}:extra": None}
    assert scan(site.path).problems == ()


def test_wheels_and_archives_on_the_path_declare_plugins(environment) -> None:
    site = environment.site("unpacked")
    site.add("acme", sampler="zipped = zipped_module:sample", modules={"zipped_module.py": MODULE})
    wheel = environment.root / "acme-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for file in site.path.rglob("*"):
            archive.write(file, file.relative_to(site.path))
    shutil.rmtree(site.path)
    broken = environment.root / "broken.zip"
    broken.write_bytes(b"PK\x03\x04 no archive")
    environment.use(broken, wheel)
    assert SamplerPlugin("zipped")() == "zipped_module"
    assert SamplerPlugin("zipped").registration().distribution.location == str(
        wheel / "acme-1.0.dist-info"
    )


def test_a_finder_that_raises_costs_what_it_would_have_found(environment, monkeypatch) -> None:
    class Finder:
        @staticmethod
        def find_spec(*arguments):
            return None

        @staticmethod
        def find_distributions(context):
            raise RuntimeError("finder is broken")

    site = good(environment)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Finder])
    discovery.forget()
    assert SamplerPlugin("good")() == "good_module"
    assert "finder is broken" in scan(site.path).problems[-1].message


def test_what_is_installed_in_a_running_process_is_found_after_forgetting(environment) -> None:
    site = environment.site()
    site.add("one", sampler="a = m:o")
    assert SamplerPlugin.names() == ["a"]
    status = os.stat(site.path)
    site.add("two", sampler="b = m:o")
    os.utime(site.path, ns=(status.st_atime_ns, status.st_mtime_ns))  # within one tick of a clock
    assert SamplerPlugin.names() == ["a"]
    discovery.forget()
    assert SamplerPlugin.names() == ["a", "b"]


def test_the_environment_is_scanned_once_a_process_and_only_plugins_are_parsed(environment) -> None:
    site = environment.site()
    for number in range(5):
        site.add(f"other{number}", entry_points=b"[console_scripts]\na = b:c\n")
    site.add("acme", sampler="x = m:o")
    opened = environment.output(
        "import sys, importlib_metadata\n"
        "from core_plugin import discovery\n"
        "from core_plugin.types import OptimizerPlugin\n"
        "opened = []\n"
        "sys.addaudithook(lambda e, a: e == 'open' and opened.append(str(a[0])))\n"
        "for _ in range(3):\n"
        "    discovery.scan(); OptimizerPlugin.names()\n"
        "    try: OptimizerPlugin('none-such').resolve()\n"
        "    except ValueError: pass\n"
        "print(*(f for f in opened if 'site/' in f), sep='\\n')\n"
    ).splitlines()
    opened = [file.removeprefix(f"{site.path}/") for file in opened if str(site.path) in file]
    assert sorted(f for f in opened if f.endswith("entry_points.txt")) == sorted(
        f"{name}-1.0.dist-info/entry_points.txt"
        for name in ("acme", *(f"other{n}" for n in range(5)))
    )
    others = [file for file in opened if not file.endswith("entry_points.txt")]
    assert all(file.startswith("acme-1.0.dist-info/") for file in others)


def test_what_is_found_does_not_depend_on_the_order_of_a_directory(
    environment, monkeypatch
) -> None:
    site = environment.site()
    for name in "abcdef":
        for version in ("1.0", "2.0"):
            site.add(name, version, sampler=f"{name} = m:o\nx = m:o")
    site.add("a", metadata=False, info="a-3.0.dist-info")
    results = []
    listdir = os.listdir
    for seed in range(6):

        def shuffled(path=".", seed=seed):
            return random.Random(seed).sample(names := listdir(path), len(names))

        monkeypatch.setattr(os, "listdir", shuffled)
        importlib_metadata.MetadataPathFinder.invalidate_caches()
        results.append(scan(site.path))
    assert len(results[0].candidates) == 24
    assert all(result == results[0] for result in results)


def test_what_is_printed_does_not_depend_on_the_hash_seed(environment) -> None:
    site, other = environment.site("one"), environment.site("two")
    for name in "pqrs":
        site.add(name, sampler=f"{name} = m:o\nx = m:o", requires=("torch<1", "core-plugin<0.1"))
        other.add(name, "2.0", sampler=f"{name} = m:o", requires=("core-plugin<0.1", "torch<1"))
    first, second = (
        environment.output(
            "from core_plugin.cli import app\napp(['list', '--json'], standalone_mode=False)\n"
            "from core_plugin import discovery; print(discovery.scan().problems)",
            PYTHONHASHSEED=seed,
        )
        for seed in ("1", "2")
    )
    assert first == second
    assert first.count('"shadowed"') == 8
