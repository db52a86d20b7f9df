"""Which Java is used where there are several, one that is too old, or none."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from services.janitor.spark.session import java_environment


def java(folder: Path, version: str, status: int = 0) -> Path:
    """A home whose java says that it has this version."""
    program = folder / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\"' >&2\nexit {status}\n")
    program.chmod(0o755)
    return folder


def _home(environ: Mapping[str, str]) -> Path:
    return Path(java_environment(environ)["JAVA_HOME"])


@pytest.mark.parametrize("version", ["17.0.15", "21", "21.0.8-ea"])
def test_the_java_home_that_is_set_is_used_where_spark_can_run_on_it(
    tmp_path: Path, version: str
) -> None:
    home = java(tmp_path / "set", version)
    other = java(tmp_path / "other", "17.0.1")

    found = _home({"JAVA_HOME": str(home), "PATH": str(other / "bin")})

    assert found == home


@pytest.mark.parametrize("version", ["11.0.2", "1.8.0_392", "25.0.1", "none"])
def test_a_java_home_of_another_version_is_passed_over_for_the_one_on_the_path(
    tmp_path: Path, version: str
) -> None:
    home = java(tmp_path / "set", version)
    other = java(tmp_path / "other", "17.0.1")

    found = _home({"JAVA_HOME": str(home), "PATH": str(other / "bin")})

    assert found == other


def test_the_home_behind_a_link_on_the_path_is_found(tmp_path: Path) -> None:
    home = java(tmp_path / "lib" / "java-21", "21.0.1")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "java").symlink_to(home / "bin" / "java")

    assert _home({"PATH": str(tmp_path / "bin")}) == home


@pytest.mark.parametrize("set_home", ["/no/such/folder", ""])
def test_without_a_java_of_the_machine_the_one_of_the_package_runs(
    tmp_path: Path, set_home: str
) -> None:
    broken = java(tmp_path / "broken", "17.0.1", status=1)

    environ = java_environment({"JAVA_HOME": set_home, "PATH": str(broken / "bin")})

    # With the argument that its runtime does not know, as Spark calls it.
    arguments = ["--add-modules=jdk.incubator.vector", "-Da=b c", "-version"]
    result = subprocess.run(
        [Path(environ["JAVA_HOME"]) / "bin" / "java", *arguments],
        env=environ,
        capture_output=True,
        text=True,
        check=True,
    )
    assert 'version "21' in result.stderr
