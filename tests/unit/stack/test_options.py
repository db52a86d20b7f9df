from pathlib import Path

import pytest

from services.stack.options import parse


def test_a_data_folder_becomes_the_root_and_holds_the_logs(tmp_path: Path) -> None:
    options = parse(["--data", str(tmp_path / "my data")], services_count=4, environ={})

    assert options.root == f"file://{tmp_path}/my%20data"
    assert options.logs == tmp_path / "my data" / "logs"


def test_a_store_keeps_its_url_and_logs_to_stderr() -> None:
    options = parse(["--store", "s3://bucket/a?region=x"], services_count=4, environ={})

    assert (options.root, options.data, options.logs) == ("s3://bucket/a?region=x", None, None)


def test_the_store_of_the_logs_is_taken_from_the_environment_too() -> None:
    environ = {"SLATEMQ_WAL_STORE": "s3://fast"}
    assert parse(["--data", "d"], 4, environ).wal_store == "s3://fast"
    assert parse(["--data", "d", "--wal-store", "gs://fast"], 4, environ).wal_store == "gs://fast"
    assert parse(["--data", "d"], 4, {}).wal_store == ""


@pytest.mark.parametrize(
    ("argv", "word"),
    [
        ([], "--data"),
        (["--data", "d", "--store", "s3://b"], "not allowed"),
        (["--data", "d", "--port", "9000"], "unrecognized arguments: --port"),
        (["--data", "d", "--ports", "65534"], "--ports"),
        (["--data", "d", "--ports", "0"], "--ports"),
        (["--data", "d", "--ports", "many"], "--ports"),
        (["--store", "memory:///"], "memory"),
        (["--store", "ftp://x"], "unknown scheme"),
        (["--data", "/d", "--wal-store", "file:///d/logs"], "it is the store of the root"),
        (["--data", "d", "--wal-store", "s3://b/prefix"], "give the bucket alone"),
    ],
)
def test_a_wrong_command_line_ends_with_2_and_names_what_is_wrong(
    argv: list[str], word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(argv, services_count=4, environ={})

    assert ended.value.code == 2
    assert word in capsys.readouterr().err
