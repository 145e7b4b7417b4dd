"""Policies that do not grow: random search, evolution, local search, TPE."""

from __future__ import annotations

from collections import deque

from nni_petridish.studies.judge.scene import IDLE, Policy, Scene, Training, Trainings


def random_search(scene: Scene) -> Trainings:
    """Train architectures drawn from all within the limit, none twice."""
    for code in _shuffled(scene):
        yield Training(code)


def regularized_evolution(population: int = 10, sample: int = 3) -> Policy:
    """Return regularized evolution (Real et al. 2019): the oldest dies, one digit mutates."""

    def run(scene: Scene) -> Trainings:
        alive: deque[tuple[float, str]] = deque()
        for code in _shuffled(scene)[:population]:
            alive.append(((yield Training(code)), code))
        while True:
            rivals = scene.rng.sample(list(alive), min(sample, len(alive)))
            code = scene.rng.choice(_neighbors(scene, max(rivals)[1]))
            alive.append(((yield Training(code)), code))
            alive.popleft()

    return run


def local_search(scene: Scene) -> Trainings:
    """Climb: train neighbors in random order, move to a better one; restart on a hilltop."""
    known: dict[str, float] = {}
    for start in _shuffled(scene):
        if start not in known:
            known[start] = yield Training(start)
        here, moved = start, True
        while moved:
            moved = False
            around = _neighbors(scene, here)
            scene.rng.shuffle(around)
            for code in around:
                if code not in known:
                    known[code] = yield Training(code)
                if known[code] > known[here]:
                    here, moved = code, True
                    break


def tpe(scene: Scene) -> Trainings:
    """Let Optuna's TPE propose digits; one beyond the limit counts as 0 % and as no training."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    sampler = optuna.samplers.TPESampler(seed=scene.rng.randrange(2**31))
    study = optuna.create_study(direction="maximize", sampler=sampler)
    digits = ["".join(sorted({code[i] for code in scene.table.rows})) for i in _places(scene)]
    refused = 0
    while refused < IDLE:
        trial = study.ask()
        code = "".join(trial.suggest_categorical(f"d{i}", digits[i]) for i in _places(scene))
        if not scene.fits(code):
            study.tell(trial, 0.0)
            refused += 1
            continue
        refused = 0
        study.tell(trial, (yield Training(code)))


def _shuffled(scene: Scene) -> list[str]:
    """Return all architectures within the limit in random order."""
    codes = [code for code in scene.table.rows if scene.fits(code)]
    scene.rng.shuffle(codes)
    return codes


def _places(scene: Scene) -> range:
    return range(len(scene.table.seed))


def _neighbors(scene: Scene, code: str) -> list[str]:
    """Return the architectures within the limit that differ in one digit."""
    digits = sorted({digit for other in scene.table.rows for digit in other[:1]})
    found = [
        code[:i] + digit + code[i + 1 :]
        for i in range(len(code))
        for digit in digits
        if digit != code[i]
    ]
    return [other for other in found if scene.fits(other)]
