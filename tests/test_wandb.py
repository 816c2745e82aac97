"""Weights & Biases as a copy of the record, offline and read back; nothing here needs a network or an account."""

import os
import shutil
import socket
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import wandb
from cli import ROOT, SMALL, STEPS, Outcome, only_record, raise_after, read, read_metrics, records, run, status
from results_command import results
from wandb_log import OfflineRun, offline_runs

from dpbench.config.schema import TrackerSettings
from dpbench.results import sync
from dpbench.tracking import open_tracker, tracker_line
from dpbench.tracking import tracker as tracking
from dpbench.tracking.wandb import METRICS

SETTINGS = tuple(setting for setting in SMALL if setting != "tracker=disabled")
OFFLINE = (*SETTINGS, "tracker.mode=offline")


@dataclass
class Network:
    """Attempts to reach anything but this machine."""

    attempts: list[Any] = field(default_factory=list)


@pytest.fixture(scope="module", autouse=True)
def network(tmp_path_factory) -> Iterator[Network]:
    """W&B with an account, without the user's settings; where it would go online it finds a server that only counts.

    W&B sends from a process of its own, so the server is put in the place of W&B's and of every proxy.
    """
    found = Network()

    class Count(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            found.attempts.append(self.request.recv(200))

    connect = socket.socket.connect

    def connect_here(self: socket.socket, address: Any) -> None:
        if self.family != socket.AF_UNIX and address[0] not in ("127.0.0.1", "::1", "localhost"):
            found.attempts.append(address)
            raise OSError("tests have no network")
        connect(self, address)

    home = tmp_path_factory.mktemp("wandb-home")
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Count) as server, pytest.MonkeyPatch.context() as patch:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}"
        for name in [name for name in os.environ if name.startswith("WANDB_")]:
            patch.delenv(name)
        for name in ("CONFIG_DIR", "CACHE_DIR", "DATA_DIR", "ARTIFACT_DIR"):
            patch.setenv(f"WANDB_{name}", str(home))
        patch.setenv("NETRC", str(home / "netrc"))
        patch.setenv("WANDB_BASE_URL", url)
        patch.setenv("WANDB_API_KEY", 40 * "0")
        patch.setenv("WANDB_INIT_TIMEOUT", "10")
        for name in ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy", "ALL_PROXY", "all_proxy"):
            patch.setenv(name, url)
        for name in ("NO_PROXY", "no_proxy"):
            patch.delenv(name, raising=False)
        patch.setattr(socket.socket, "connect", connect_here)
        wandb.teardown()  # W&B reads its environment once
        yield found
        wandb.teardown()
        server.shutdown()


def written(results: Path) -> list[OfflineRun]:
    """The W&B runs below a results folder, once W&B has written all that it was sent, as when dpbench ends."""
    wandb.teardown()
    return offline_runs(results)


# A sweep of two runs.


@pytest.fixture(scope="module")
def sweep(tmp_path_factory) -> Outcome:
    results = tmp_path_factory.mktemp("sweep")
    return run(results, "algo=dpsgd,disk", "eps=8", "-m", "tracker.tags=[mine]", settings=OFFLINE)


@pytest.fixture(scope="module")
def trained(sweep) -> list[OfflineRun]:
    return [each for each in written(sweep.results) if each.run.job_type == "train"]


@pytest.fixture(scope="module")
def folders(sweep) -> dict[str, Path]:
    """The local records by algorithm."""
    return {read(record, "summary.json")["algorithm"]: record for record in records(sweep.results)}


def test_a_sweep_is_two_training_runs_and_a_table_in_one_group(sweep):
    assert (sweep.code, sweep.err) == (0, "")
    runs = written(sweep.results)
    assert [each.run.job_type for each in runs] == ["train", "train", "table"]
    assert len({each.run.run_id for each in runs}) == 3
    (folder,) = (sweep.results / "sweeps").iterdir()
    assert {each.run.run_group for each in runs} == {f"sweep-{folder.name}"}
    assert {each.run.project for each in runs} == {"dpbench"}
    assert [each.exit_code for each in runs] == [0, 0, 0]


def test_each_run_has_its_own_config(trained, folders):
    assert [each.config["algo"]["name"] for each in trained] == ["dpsgd", "disk"]
    assert [each.config["query"]["kind"] for each in trained] == ["OnePoint", "TwoPoint"]
    for each in trained:
        assert (each.config["eps"], each.config["seed"], each.config["batch_size"]) == (8, 0, 64)
        assert each.config["hash"] == folders[each.config["algo"]["name"]].parent.name


def test_runs_are_named_and_tagged_by_what_they_are(trained):
    for each, algorithm in zip(trained, ("dpsgd", "disk"), strict=True):
        assert set(each.run.tags) == {"mine", algorithm, "digits", "linear"}
        assert f"algo={algorithm}" in each.run.display_name


def test_metrics_are_plotted_over_epochs_and_summed_up_by_their_last_value(trained):
    for each in trained:
        defined = {name: metric for name, metric in each.metrics.items() if metric.options.defined}
        assert set(defined) == set(METRICS)
        for metric in defined.values():
            assert metric.step_metric == "epoch"
            assert metric.summary.last
            assert not metric.summary.max
            assert not metric.summary.best


def test_the_history_is_what_the_record_holds(trained, folders):
    for each in trained:
        local = read_metrics(folders[each.config["algo"]["name"]])
        assert [line["_step"] for line in each.history] == [line["step"] for line in local] == [2, STEPS]
        for line, expected in zip(each.history, local, strict=True):
            assert {key: line[key] for key in expected} == pytest.approx(expected)


def test_the_summary_is_what_the_record_holds(trained, folders):
    for each in trained:
        local = read(folders[each.config["algo"]["name"]], "summary.json")
        assert each.summary["test_accuracy/final"] == local["test_accuracy"]["final"]
        assert each.summary["test_accuracy/best"] == local["test_accuracy"]["best"]
        assert each.summary["eps"] == local["eps"] <= 8
        assert each.summary["noise_multiplier"] == local["noise_multiplier"]


def test_the_table_run_holds_the_accuracy_of_every_run(sweep, folders):
    (table,) = [each for each in written(sweep.results) if each.run.job_type == "table"]
    rows = table.table("accuracy")
    assert [row["run"] for row in rows] == ["algo=dpsgd", "algo=disk"]
    for row in rows:
        local = read(folders[row["algo"]], "summary.json")
        assert row["test accuracy"] == local["test_accuracy"]["final"]
        assert row["best on test"] == local["test_accuracy"]["best"]
        assert float(row["eps"]) == local["eps"]
        assert (row["target eps"], row["seed"], row["status"]) == ("8.0", 0, "finished")
    stages = [(row["query"], row["filter"], row["clip"], row["dataset"]) for row in rows]
    assert stages == [("one_point", "none", "automatic", "digits"), ("two_point", "exponential", "automatic", "digits")]


@pytest.mark.parametrize("names", ["digits,cifar100", "cifar100,digits"])
def test_the_table_holds_runs_that_were_refused_beside_others(names, tmp_path):
    outcome = run(tmp_path, f"dataset={names}", "eps=8", "-m", f"data.root={tmp_path}", settings=OFFLINE)
    assert outcome.code == 2
    assert "W&B" not in outcome.err
    told = "warning: not here: data cifar100; cifar-100-python/train is missing; its runs will be refused when"
    assert " ".join(outcome.err.split()).startswith(told)
    (table,) = [each for each in written(tmp_path) if each.run.job_type == "table"]
    found = {row["dataset"]: row["status"] for row in table.table("accuracy")}
    assert found == {"digits": "finished", "cifar100": "refused"}


def test_a_finished_sweep_makes_no_further_runs(sweep, trained):
    again = run(sweep.results, "algo=dpsgd,disk", "eps=8", "-m", "tracker.tags=[mine]", settings=OFFLINE)
    assert again.code == 0
    assert len(written(sweep.results)) == len(trained) + 1


def test_a_run_that_diverges_is_marked_as_failed(tmp_path):
    arguments = ["eps=inf", "clip=none", "optim.lr=1e38", "tracker.group=mine", "tracker.project=other"]
    assert run(tmp_path, *arguments, settings=OFFLINE).code == 1
    (only,) = written(tmp_path)
    assert only.exit_code == 1
    assert (only.run.run_group, only.run.project) == ("mine", "other")
    assert only.config["eps"] == only.summary["target_eps"] == "inf"


def test_offline_reaches_for_no_network(network, sweep):
    assert sweep.code == 0
    assert network.attempts == []


def test_offline_reaches_for_no_network_when_the_process_ends(network, tmp_path):
    """Until when W&B may keep what it has to tell of itself."""
    known = len(network.attempts)
    env = {name: value for name, value in os.environ.items() if name != "WANDB_ERROR_REPORTING"}
    typed = [sys.executable, "-m", "dpbench.run", *OFFLINE, "eps=inf", f"results_dir={tmp_path}"]
    subprocess.run(typed, cwd=ROOT, env=env, capture_output=True, check=True)
    assert len(offline_runs(tmp_path)) == 1
    assert network.attempts[known:] == []


# A run that goes on.


def stopped_and_gone_on(results, *tracking: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        raise_after(patch, 2, RuntimeError("stopped"))
        assert run(
            results, "checkpoint.every_steps=2", "evaluation.every_steps=1", settings=(*SETTINGS, *tracking)
        ).code
    assert run(results, "evaluation.every_steps=1", settings=(*SETTINGS, *tracking)).code == 0


def test_offline_a_run_that_goes_on_is_written_whole_under_its_id(tmp_path):
    stopped_and_gone_on(tmp_path, "tracker.mode=offline")
    first, second = sorted(written(tmp_path), key=lambda each: len(each.history))
    assert first.run.run_id == second.run.run_id
    assert [line["_step"] for line in first.history] == [1, 2]
    assert [line["_step"] for line in second.history] == [1, 2, 3]
    assert [first.exit_code, second.exit_code] == [1, 0]
    for line, expected in zip(second.history, read_metrics(only_record(tmp_path)), strict=True):
        assert {key: line[key] for key in expected} == pytest.approx(expected)


def test_online_a_run_that_goes_on_is_the_run_of_its_id_and_logs_what_is_missing(tmp_path, monkeypatch):
    asked, logged = [], []

    class Online(Broken):
        """A run of which the server has the first step."""

        def __init__(self, **settings: Any) -> None:
            super().__init__()
            asked.append({name: settings[name] for name in ("id", "resume", "mode")})
            self.step = 2 if settings["resume"] else 0

        def log(self, metrics: dict[str, float], step: int) -> None:
            logged.append(step)

    monkeypatch.setattr(wandb, "init", Online)
    stopped_and_gone_on(tmp_path, "tracker.mode=online")
    assert asked == [
        {"id": asked[0]["id"], "resume": None, "mode": "online"},
        {"id": asked[0]["id"], "resume": "allow", "mode": "online"},
    ]
    assert logged == [1, 2, 2, 3]


# W&B never stops a run.


class Broken:
    """A W&B run whose every log fails."""

    def __init__(self, **_: Any) -> None:
        self.summary: dict[str, Any] = {}

    def define_metric(self, *_: Any, **__: Any) -> None:
        pass

    def log(self, *_: Any, **__: Any) -> None:
        raise ConnectionError("the server is gone")

    def finish(self, **_: Any) -> None:
        pass


def refuse(**_: Any) -> None:
    raise ConnectionError("the server is gone")


@pytest.mark.parametrize("init", [refuse, Broken], ids=["init", "log"])
def test_a_run_finishes_whatever_fails_in_the_tracker(tmp_path, monkeypatch, init):
    monkeypatch.setattr(wandb, "init", init)
    outcome = run(tmp_path, "-m", "eps=inf", settings=OFFLINE)
    assert outcome.code == 0
    record = only_record(tmp_path)
    assert status(record) == "finished"
    assert [line["step"] for line in read_metrics(record)] == [2, STEPS]


def test_a_user_is_told_that_the_tracker_failed(tmp_path, monkeypatch):
    monkeypatch.setattr(wandb, "init", refuse)
    outcome = run(tmp_path, "eps=inf", settings=OFFLINE)
    said = " ".join((outcome.out + outcome.err).split())
    assert "W&B failed to start (ConnectionError: the server is gone)" in said


@pytest.mark.parametrize("fuse", ["true", "false"])
def test_a_run_whose_tracker_failed_leaves_the_next_one_alone(tmp_path, monkeypatch, fuse):
    log = wandb.Run.log
    failed = []

    def fail_once(self: wandb.Run, *arguments: Any, **settings: Any) -> None:
        if not failed:
            failed.append(self.id)
            raise ConnectionError("the server is gone")
        log(self, *arguments, **settings)

    monkeypatch.setattr(wandb.Run, "log", fail_once)
    assert run(tmp_path, "-m", "eps=inf", "seed=0,1", f"fuse_seeds={fuse}", settings=OFFLINE).code == 0
    (second,) = [each for each in written(tmp_path) if each.config.get("seed") == 1]
    assert failed != [second.run.run_id]
    assert [line["_step"] for line in second.history] == [2, STEPS]
    assert second.exit_code == 0


# Which mode is used.


def test_without_a_tracker_nothing_of_it_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(wandb, "init", lambda **_: pytest.fail("started"))
    monkeypatch.chdir(tmp_path)
    outcome = run(tmp_path / "results", "-m", "eps=inf", "tracker=disabled", settings=SETTINGS)
    assert outcome.code == 0
    assert "W&B: disabled (as asked)" in outcome.out.splitlines()
    assert sorted(path.name for path in (tmp_path / "results").iterdir()) == ["runs", "sweeps"]
    assert [path.name for path in tmp_path.iterdir()] == ["results"]


def test_one_line_of_a_sweep_says_which_mode_is_used_and_where(sweep):
    lines = [line for line in sweep.out.splitlines() if "W&B" in line]
    assert lines == [f"W&B: offline (as asked), in {sweep.results / 'wandb'}"]


@pytest.fixture
def _wandb_as_before() -> Iterator[None]:
    yield
    wandb.teardown()


@pytest.mark.usefixtures("_wandb_as_before")
def test_without_a_key_runs_stay_offline_and_the_line_says_how_to_log_in(tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_API_KEY")
    wandb.teardown()
    line = tracker_line(TrackerSettings(mode="auto"), tmp_path)
    assert line == f"W&B: offline (no API key; log in with: wandb login), in {tmp_path / 'wandb'}"


@pytest.mark.usefixtures("_wandb_as_before")
def test_who_has_logged_in_goes_online_without_a_key_in_the_environment(tmp_path, monkeypatch):
    """`wandb login` keeps the key in a file of the user's, by the name of the server."""
    monkeypatch.delenv("WANDB_API_KEY")
    server = os.environ["WANDB_BASE_URL"].removeprefix("http://")
    (tmp_path / "netrc").write_text(f"machine {server}\n  login user\n  password {40 * 'a'}\n")
    (tmp_path / "netrc").chmod(0o600)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    wandb.teardown()
    line = tracker_line(TrackerSettings(mode="auto", project="other"), tmp_path)
    assert line == "W&B: online (tracker.mode=offline keeps it here), project other"
    (tmp_path / "netrc").write_text(f"machine elsewhere\n  login user\n  password {40 * 'a'}\n")
    assert tracker_line(TrackerSettings(mode="auto"), tmp_path).startswith("W&B: offline (no API key;")


@pytest.mark.usefixtures("_wandb_as_before")
def test_who_has_a_token_file_goes_online(tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_API_KEY")
    monkeypatch.setenv("WANDB_IDENTITY_TOKEN_FILE", str(tmp_path / "token"))
    wandb.teardown()
    assert tracker_line(TrackerSettings(mode="auto"), tmp_path).startswith("W&B: online")


def test_with_a_key_runs_go_online_and_the_line_says_how_to_keep_them_here(tmp_path):
    line = tracker_line(TrackerSettings(mode="auto", project="other"), tmp_path)
    assert line == "W&B: online (tracker.mode=offline keeps it here), project other"


@pytest.mark.parametrize("mode", ["online", "offline", "disabled"])
def test_the_users_wandb_mode_decides_where_the_setting_is_auto(mode, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", mode)
    assert tracker_line(TrackerSettings(mode="auto"), tmp_path).startswith(f"W&B: {mode} (as WANDB_MODE says)")
    assert tracker_line(TrackerSettings(mode="disabled"), tmp_path) == "W&B: disabled (as asked)"


@pytest.mark.usefixtures("_wandb_as_before")
@pytest.mark.parametrize(("word", "mode"), [("dryrun", "offline"), ("run", "online"), ("nonsense", "disabled")])
def test_other_words_of_the_user_mean_what_they_mean_to_wandb_and_are_one_line(word, mode, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", word)
    wandb.teardown()
    line = tracker_line(TrackerSettings(mode="auto"), tmp_path)
    assert line.startswith(f"W&B: {mode} (")
    assert "\n" not in line


# Runs that were recorded without W&B, or offline, sent later.


@pytest.fixture
def recorded(sweep, tmp_path) -> Path:
    """The records of the sweep without what W&B wrote of it."""
    shutil.copytree(sweep.results / "runs", tmp_path / "results" / "runs")
    return tmp_path / "results"


def sent(outcome: Outcome) -> list[OfflineRun]:
    assert (outcome.code, outcome.err) == (0, "")
    return written(outcome.results)


def test_a_run_that_is_sent_later_is_the_run_that_was_tracked(recorded, trained):
    later = {each.config["hash"]: each for each in sent(results(recorded, "export", "to=wandb", "mode=offline"))}
    assert len(later) == len(trained) == 2
    for live in trained:
        found = later[live.config["hash"]]
        assert found.run.run_id == f"{live.config['hash']}-0"
        for name in ("project", "run_group", "job_type", "display_name"):
            assert getattr(found.run, name) == getattr(live.run, name)
        assert sorted(found.run.tags) == sorted(live.run.tags)
        own = {"_wandb"}
        assert {k: v for k, v in found.config.items() if k not in own} == {
            k: v for k, v in live.config.items() if k not in own
        }
        ours = [{k: v for k, v in line.items() if k[:5] not in ("_runt", "_time")} for line in found.history]
        theirs = [{k: v for k, v in line.items() if k[:5] not in ("_runt", "_time")} for line in live.history]
        assert ours == theirs
        numbers = {k: v for k, v in live.summary.items() if not k.startswith("_")}
        assert {k: v for k, v in found.summary.items() if not k.startswith("_")} == numbers
        assert found.exit_code == live.exit_code == 0


def test_what_is_sent_twice_is_one_run(recorded):
    first = sent(results(recorded, "export", "algo=disk", "to=wandb", "mode=offline"))
    assert len(first) == 1
    again = results(recorded, "export", "to=wandb", "mode=offline", "project=other")
    both = sent(again)
    assert "1 run written" in again.out
    assert "1 of 2 were there already" in again.out
    assert {each.run.run_id for each in both} == {f"{one.parent.name}-0" for one in records(recorded)}
    assert [each.run.project for each in both] == ["dpbench", "other"]
    (record,) = [one for one in records(recorded) if read(one, "summary.json")["algorithm"] == "disk"]
    now = time.time() + 1
    os.utime(record / "status.json", (now, now))  # it was run again
    repeated = sent(results(recorded, "export", "algo=disk", "to=wandb", "mode=offline"))
    assert len(repeated) == 3
    assert len({each.run.run_id for each in repeated}) == 2


def test_runs_that_were_tracked_or_have_not_ended_are_left_out(recorded):
    tracked, running = records(recorded)
    text = (tracked / "config.yaml").read_text()
    (tracked / "config.yaml").write_text(text.replace("mode: offline", "mode: auto"))
    (running / "status.json").write_text('{"status": "running"}')
    outcome = results(recorded, "export", "to=wandb", "mode=offline")
    assert sent(outcome) == []
    assert "1 run left out, which W&B may have recorded while running; tracker.mode=auto selects them" in outcome.out
    assert len(sent(results(recorded, "export", "tracker.mode=auto", "to=wandb", "mode=offline"))) == 1


def test_a_failure_of_wandb_is_told_and_is_an_error(recorded, monkeypatch):
    monkeypatch.setattr(wandb, "init", fail)
    outcome = results(recorded, "export", "to=wandb", "mode=offline")
    assert outcome.code == 1
    assert outcome.out.count("W&B failed to start (RuntimeError: no disk)") == 2


def fail(**_: Any) -> None:
    raise RuntimeError("no disk")


@pytest.mark.parametrize("mode", ["disabled", "sometimes"])
def test_a_mode_that_sends_nothing_is_refused(recorded, mode):
    outcome = results(recorded, "export", "to=wandb", f"mode={mode}")
    assert outcome.code == 2
    assert f"mode={mode}: " in outcome.error()


def test_sending_offline_reaches_for_no_network(network, recorded):
    assert len(sent(results(recorded, "export", "to=wandb", "mode=offline"))) == 2
    assert network.attempts == []


@pytest.mark.usefixtures("_wandb_as_before", "network")
def test_runs_that_could_only_be_written_here_do_not_count_as_sent(recorded, monkeypatch):
    monkeypatch.setattr(tracking, "_service", tracking.Service())
    monkeypatch.setenv("WANDB_INIT_TIMEOUT", "1")
    outcome = results(recorded, "export", "to=wandb", "mode=online")
    assert outcome.code == 1
    last = outcome.out.splitlines()[-1]
    here = f"2 written to {recorded / 'wandb'}; wandb sync sends them"
    assert last == f"0 runs sent; {here}; 0 of 2 were there already. W&B: online (it could not go online)"
    assert len(written(recorded)) == 2


def test_a_run_that_was_refused_does_not_count_as_sent(recorded, monkeypatch):
    given = []

    def send(record, mode, options, results_dir, failed):
        given.append(record)
        if len(given) == 1:
            failed("refused")

    monkeypatch.setattr(sync, "_send", send)
    outcome = results(recorded, "export", "to=wandb", "mode=offline")
    assert outcome.code == 1
    written_here = f"1 run written to {recorded / 'wandb'}; wandb sync sends them"
    assert outcome.out.splitlines()[-1].startswith(f"{written_here}; 0 of 2 were there already; 1 not sent. W&B: ")


@pytest.mark.usefixtures("network")
def test_runs_that_a_hanging_service_got_do_not_count_as_sent(recorded, monkeypatch):
    monkeypatch.setattr(tracking, "_service", tracking.Service())
    monkeypatch.setattr(tracking, "PATIENCE", 0.5)
    monkeypatch.setattr(wandb, "init", lambda **_: time.sleep(2))
    outcome = results(recorded, "export", "to=wandb", "mode=online")
    assert outcome.code == 1
    assert outcome.out.splitlines()[-1].startswith("0 runs sent; 0 of 2 were there already; 2 not sent. W&B: online (")


def test_where_the_server_does_not_answer_runs_are_recorded_here_under_their_ids(tmp_path, monkeypatch, network):
    monkeypatch.setattr(tracking, "_service", tracking.Service())
    monkeypatch.setenv("WANDB_INIT_TIMEOUT", "1")
    settings, said = TrackerSettings(mode="online"), []
    trackers = [
        open_tracker(settings, tmp_path, name=name, config={}, tags=(), say=said.append, logged=[{"step": 1.0}])
        for name in ("a", "b")
    ]
    for tracker in trackers:
        tracker.log({"step": 2.0}, 2)
        tracker.finish({"steps": 2}, succeeded=True)
        tracker.wait()
    network.attempts.clear()
    (line,) = said
    assert line.startswith("W&B can't go online (")
    runs = written(tmp_path)
    assert {run.run.run_id: run.run.display_name for run in runs} == {
        tracker.id: name for tracker, name in zip(trackers, ("a", "b"), strict=True)
    }
    assert [[line["_step"] for line in run.history] for run in runs] == [[1, 2]] * 2
    assert [run.exit_code for run in runs] == [0, 0]
