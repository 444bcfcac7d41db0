"""Runs as processes: cores, GPUs, torchrun and failures; the plan that a dry run prints."""
import io
import shlex
from pathlib import Path

import pytest
import torch

import ablations
import cli
import devices
import helpers
import progress
import run_folder
import sweeps
import train_baselines
import train_crae


@pytest.fixture
def asked(monkeypatch):
    """The command and the environment of each process that would start, on a machine with eight cores."""
    started = []
    monkeypatch.setattr(sweeps.subprocess, "Popen",
                        lambda command, env, **rest: started.append((command, env)))
    monkeypatch.setattr(devices, "cores", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return started


def test_cores_and_gpus_are_distributed_over_the_runs(asked, monkeypatch, tmp_path):
    run = sweeps.plan_run(dict(plus=True, aux=False, dataset="digits", seed=3), tmp_path)
    sweeps.start_run(run, 1, 4, 1, None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for slot in range(4):
        sweeps.start_run(run, slot, 4, 1, None)
    assert [env["OMP_NUM_THREADS"] for _, env in asked] == ["2"] * 5
    assert "CUDA_VISIBLE_DEVICES" not in asked[0][1]
    assert [env["CUDA_VISIBLE_DEVICES"] for _, env in asked[1:]] == ["0", "1", "0", "1"]
    sweeps.start_run(run, 1, 4, 1, "cpu"), sweeps.start_run(run, 1, 4, 1, "cuda:1")
    assert not any("CUDA_VISIBLE_DEVICES" in env for _, env in asked[5:])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    sweeps.start_run(run, 1, 4, 1, "cuda")
    assert asked[-1][1]["CUDA_VISIBLE_DEVICES"] == "7"
    script, *words = [str(word) for word in asked[0][0][1:]]
    assert Path(script) == helpers.HERE / "train_crae.py"
    assert words == ["--plus=True", "--aux=False", "--seed=3",
                     f"--out={tmp_path}/digits_100_crae_plus_no_aux_3", "--resume"]


def test_each_process_of_a_run_has_its_own_gpu(asked, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    ablations.check_sweep([0], 2, 2, tmp_path, None)
    run = sweeps.plan_run(dict(script="train_baselines.py", method="s4l", weight=3.0), tmp_path)
    for slot in range(2):
        sweeps.start_run(run, slot, 2, 2, None)
    assert [env["CUDA_VISIBLE_DEVICES"] for _, env in asked] == ["0,1", "2,3"]
    assert [env["OMP_NUM_THREADS"] for _, env in asked] == ["2"] * 2
    words = [str(word) for word in asked[0][0][1:]]
    assert words == ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2",
                     str(helpers.HERE / "train_baselines.py"), "--method=s4l", "--weight=3.0",
                     f"--out={tmp_path}/digits_100_s4l_weight3_0", "--resume"]
    for jobs, processes, gpus in (3, 2, 4), (1, 2, 1), (2, 2, 0):
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        with pytest.raises(cli.Refused, match=f"need {jobs * processes} GPUs, but there are {gpus}"):
            ablations.check_sweep([0], jobs, processes, tmp_path, None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    ablations.check_sweep([0], 1, 2, tmp_path, None)            # two processes share the CPU cores


@pytest.mark.slow
def test_a_run_that_fails_is_named_and_the_others_are_finished(monkeypatch, tmp_path):
    runs = [sweeps.plan_run(dict(helpers.FOUR_STEPS, seed=seed), tmp_path) for seed in (0, 1)]
    runs[0]["folder"].mkdir()
    (runs[0]["folder"] / "something").touch()                   # not the folder of a run
    failed, = sweeps.sweep(runs, 1, 1, "cpu")
    assert "_0_" in failed and "is not the folder of a run" in failed
    assert sweeps.is_finished(runs[1])
    monkeypatch.setattr(sweeps, "sweep", lambda *rest: [failed])
    with pytest.raises(cli.Refused,
                       match="1 of 2 runs failed; the first is .*_0_.*is not the folder of a run"):
        ablations.ablate("diversity", out=str(tmp_path / "other"), device="cpu")


@pytest.mark.slow
def test_several_processes_train_a_run_and_a_failure_is_named(tmp_path):
    flags = dict(helpers.FOUR_STEPS, script="train_baselines.py", method="s4l", rotations="one")
    runs = [sweeps.plan_run(dict(flags, seed=seed), tmp_path) for seed in (0, 1)]
    runs[0]["folder"].mkdir()
    (runs[0]["folder"] / "something").touch()
    failed, = sweeps.sweep(runs, 1, 2, "cpu")
    assert failed.startswith(f"{runs[0]['folder']}: ") and "is not the folder of a run" in failed
    assert sweeps.is_finished(runs[1])


@pytest.mark.parametrize("after", ["", "E1118 12:00:00 torchrun says more\n", "W1118 and more\n",
                                   "terminate called without an active exception\nE1118 12:00:00 more\n"])
def test_the_last_line_is_that_of_the_script(after):
    assert sweeps.last_line(io.StringIO("a line\n--lr 0: must be\n" + after)) == "--lr 0: must be"
    assert sweeps.last_line(io.StringIO(after)) == "no output"


@pytest.mark.slow
def test_both_stages_of_fine_tune_count(tmp_path):
    run = sweeps.plan_run(dict(helpers.FOUR_STEPS, script="train_baselines.py", method="fine_tune"), tmp_path)
    assert sweeps.steps_done(run) == [0, 0]
    assert not sweeps.sweep([run], 1, 1, "cpu")
    assert sweeps.steps_done(run) == [4, 4] and sweeps.is_finished(run)
    (run["folder"] / "model.pt").unlink()
    (run["folder"] / "log.csv").unlink()
    assert sweeps.steps_done(run) == [4, 0] and not sweeps.is_finished(run)


# ---------------------------------------------------------------- the plan


def write_log(folder, step):
    folder.mkdir(parents=True, exist_ok=True)
    run_folder.write_rows(folder / "log.csv", [dict(step=step, test_error=1.0)], "w")


@pytest.fixture
def rate(monkeypatch):
    """A device with 1 TFLOP/s. Returns the networks that it measured."""
    measured = []

    def flop_rate(net, config, image_size):
        measured.append((net, config, image_size))
        return 1e12

    monkeypatch.setattr(devices, "flop_rate", flop_rate)
    return measured


def test_the_plan_has_steps_hours_and_what_is_finished(rate, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fine_tune = dict(script="train_baselines.py", method="fine_tune")
    flags = dict(dataset="cifar10", labels=250, arch="wrn-10-0.25", steps=1000)
    runs = [sweeps.plan_run(row | flags, "my runs") for row in (dict(plus=True), fine_tune, {}, dict(seed=1))]
    write_log(runs[1]["folder"] / "pretrain", 1000)
    write_log(runs[1]["folder"], 400)
    write_log(runs[2]["folder"], 1000)
    (runs[2]["folder"] / "model.pt").touch()
    plan = sweeps.print_plan(runs, 10, 32, jobs=2, processes=1)
    (net, config, size), = rate
    assert (size, config, net.rotation.out_features) == (32, runs[0]["config"], 40)
    builds = [train_crae.build, train_baselines.build_stage_one, train_baselines.build, train_crae.build]
    configs = [runs[k]["config"] for k in (0, 1, 1, 2)]
    plus, one, two, crae = (devices.step_flops(*pair, 10, 32) for pair in zip(builds, configs))
    assert one > 7 * two and plus > 1.9 * crae                  # 8 copies against 1, 16 against 8
    assert [p["flops"] for p in plan] == [1000 * plus, 1000 * (one + two), 1000 * crae, 1000 * crae]
    assert [p["steps"] for p in plan] == [1000, 2000, 1000, 1000]
    assert [p["finished"] for p in plan] == [False, False, True, False]
    assert [p["hours"] for p in plan] == pytest.approx([p["flops"] / 1e12 / 3600 for p in plan])
    left = 1000 * plus, 600 * two, 0, 1000 * crae
    assert [p["hours_left"] for p in plan] == pytest.approx([n / 1e12 / 3600 for n in left])
    text = capsys.readouterr().out
    assert "# Fine-tune, 250 labels, seed 0: 2,000 steps, " in text and ", 1,400 steps done\n" in text
    assert "# CRAE, 250 labels, seed 0: 1,000 steps, finished\n" in text
    assert "4 runs, 1 of them finished" in text and "Evaluations" in text
    total = progress.duration(3600 * sum(p["hours"] for p in plan))     # on a CPU, jobs share the cores
    assert f"about {total} in total, {progress.duration(sum(left) / 1e12)} left" in text
    all_flops = sum(p["flops"] for p in plan)           # of an A100's 312 TFLOP/s we assume 20 %
    on_gpu = progress.duration(all_flops / (0.2 * 312e12))
    assert f"# {all_flops / 1e15:.2g} PFLOP. An A100 at 20% of its peak would take {on_gpu} (calc" in text


def test_the_printed_commands_are_those_of_the_sweep(rate, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [dict(aux="none", ext1=True), dict(script="train_baselines.py", method="s4l", rotations="one")]
    runs = [sweeps.plan_run(row | helpers.FOUR_STEPS, "my runs") for row in rows]
    for processes in 1, 2:
        sweeps.print_plan(runs, 10, 8, 1, processes)
        printed = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("#")]
        assert len(printed) == 2
        for run, line in zip(runs, printed):
            before = ["python", *sweeps.launcher(processes)]
            words, module = shlex.split(line), sweeps.SCRIPTS[run["script"]]
            assert words[:len(before)] == before
            script, *words = words[len(before):]
            assert Path(script).resolve() == Path(module.__file__)
            config = module.configure(**cli.read_argv(words, module.FLAGS))
            expected = run["config"] | dict(out=str(run["folder"]), resume=True, command=config["command"])
            assert config == expected


def test_gpus_divide_the_hours(rate, monkeypatch, tmp_path):
    run = sweeps.plan_run(helpers.FOUR_STEPS, tmp_path)
    seconds = sweeps.print_plan([run], 10, 8, 1, 1)[0]["hours"]
    assert sweeps.print_plan([run], 10, 8, 1, 2)[0]["hours"] == seconds         # processes share the cores
    run["config"]["device"] = "cuda"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert sweeps.print_plan([run], 10, 8, 1, 4)[0]["hours"] == pytest.approx(seconds / 4)
