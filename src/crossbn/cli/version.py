"""What `crossbn --version` prints, with the standard library and torch alone."""

from crossbn.lab import environment


def installation() -> str:
    """Return the versions in one line, and in a second one what does a training step on the CPU."""
    found = environment.versions()
    versions = f"crossbn {found['crossbn']}, torch {found['torch']}, Python {found['python']}"
    if environment.has_compiled_code():
        return f"{versions}\nOn the CPU compiled code does a training step."
    return (
        f"{versions}\nOn the CPU torch's operators do a training step, slower than compiled code, which is missing or "
        "switched off (CROSSBN_NATIVE=0): install a wheel for your platform, or the sources with a C compiler."
    )
