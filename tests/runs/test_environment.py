"""What is recorded of code and hardware: any change of the code is seen, and a resumed run warns of no more
than what its numbers may depend on beside it."""

from proxima.runs.environment import DECIDES, MATTERS, changed, code_checksum, describe_environment


def test_the_checksum_of_code_changes_with_names_and_contents_of_source_files_alone(tmp_path):
    def checksum(**files):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        for name, text in files.items():
            path = folder / name.replace("__", "/").replace("_py", ".py")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return code_checksum(folder)

    first = checksum(a_py="x = 1\n", sub__b_py="y = 2\n")
    assert checksum(sub__b_py="y = 2\n", a_py="x = 1\n") == first
    assert checksum(a_py="x = 1\n", sub__b_py="y = 2\n", notes="z") == first
    others = (
        checksum(a_py="x = 2\n", sub__b_py="y = 2\n"),
        checksum(a_py="y = 2\n", sub__b_py="x = 1\n"),
        checksum(a_py="x = 1\n", sub__c_py="y = 2\n"),
        checksum(a_py="x = 1\n"),
        checksum(a_py="x = 1\ny = 2\n", sub__b_py=""),
    )
    assert len({first, *others}) == 6


def test_the_environment_names_code_and_build_of_processor():
    found = describe_environment()
    assert len(found["code"]) == 64
    assert found["code"] == code_checksum()
    assert found["processor"] == describe_environment()["processor"]
    assert {*DECIDES} <= {*found}


def test_a_resumed_run_does_not_warn_of_code_or_build_of_processor():
    now = describe_environment()
    assert changed({**now, "code": "another", "processor": "another"}, now) == []
    for name in MATTERS:
        assert changed({**now, name: "another"}, now) == [f"{name}: another -> {now[name]}"]
