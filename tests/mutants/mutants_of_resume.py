"""Known bugs of checkpoints, resuming and storage."""

from __future__ import annotations

from planting import mutant

ENGINE, LOOPS, RUNS = "tests/unit/engine", "tests/unit/loops", "tests/unit/runs"
STORAGE = "tests/unit/core/test_storage.py"
SESSION = f"{LOOPS}/test_session_checkpoints.py"

RESUME_MUTANTS = (
    mutant(
        "old-checkpoint-dropped-first",
        "engine/checkpoint.py",
        '    with atomic_dir(root / f"step_{content.step}") as folder:',
        "    for old in _complete(root)[:-1] if keep > 1 else _complete(root):\n        remove(old)\n"
        '    with atomic_dir(root / f"step_{content.step}") as folder:',
        f"{ENGINE}/test_checkpoint.py",
    ),
    mutant("extras-not-saved", "engine/checkpoint.py", "in content.extras.items():", "in ():", f"{ENGINE}/test_checkpoint.py"),
    mutant(
        "half-deleted-looks-whole",
        "core/files.py",
        "        os.replace(entry, doomed)\n        entry = doomed\n    shutil.rmtree(entry)",
        "        doomed = entry\n    shutil.rmtree(entry)",
        f"{ENGINE}/test_checkpoint.py",
    ),
    mutant("limit-ignored", "loops/session.py", "keep = session.machine.save_total_limit", "keep = 2", SESSION),
    mutant("export-always", "loops/session.py", "return self.machine.export and self.tokenizer", "return self.tokenizer", SESSION),
    mutant("first-rank-only-keeps", "loops/session.py", "session.ranks.gather(state())", "[state()]", SESSION),
    mutant("room-not-checked", "loops/session.py", "            raise StorageError(problem)", "            pass", SESSION),
    mutant("present-counted-twice", "loops/session.py", "RECORD_BYTES * self.total, present)", "RECORD_BYTES * self.total, 0)", SESSION),
    mutant(
        "adapters-not-folded", "engine/export.py", "**PlainWeights(model)}", '**PlainWeights(model, "adapter")}', f"{ENGINE}/test_export.py"
    ),
    mutant(
        "accepted-by-nobody",
        "runs/run.py",
        "found for found in inputs if found[0] not in accept",
        "found for found in inputs if not accept",
        f"{RUNS}/test_runs_run.py",
    ),
    mutant(
        "change-not-remembered",
        "runs/run.py",
        "        run._remember(settings, inputs, command)",
        "        pass",
        f"{RUNS}/test_runs_run.py",
    ),
    mutant(
        "settings-change-lost",
        "runs/run.py",
        'for entry in self.manifest.get("history", ()):',
        "for entry in ():",
        f"{RUNS}/test_runs_run.py",
    ),
    mutant(
        "mount-by-prefix-of-a-name", "core/storage.py", "real.is_relative_to(mount.point)", "str(real).startswith(mount.point)", STORAGE
    ),
    mutant("read-only-accepted", "core/storage.py", "    if not mount.writable:", "    if False:", STORAGE),
    mutant("expected-mount-ignored", "core/storage.py", "if expected and not _is(mount, expected):", "if False:", STORAGE),
    mutant("full-disk-accepted", "core/storage.py", "if room.needed > free:", "if room.needed > 2 * free:", STORAGE),
    mutant(
        "template-inside-the-tokenizer",
        "models/identity.py",
        'settings.pop("chat_template", None)',
        'settings.get("chat_template")',
        "tests/unit/models/test_identity.py",
    ),
    mutant(
        "weights-by-name-only", "models/identity.py", "[file.name, file_digest(file)]", "[file.name]", "tests/unit/models/test_identity.py"
    ),
)
