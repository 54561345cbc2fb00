"""What stallwatch is made of: no known hole in what it ships, and every licence one of a short list.  `make audit`.

Holes: pip-audit over constraints.txt, whose hashes say which files are meant.  It asks a database on the network; where
that cannot be asked the reason is printed, and nothing is said of holes; on GitHub, where it can, that is an error.
Licences: as the installed distributions say themselves; those for tests only are looked at too, for people who work on
it install them.
Exit status 1 for a hole that is known, or a licence that is not on the list.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import Distribution, distributions
from pathlib import Path

CONSTRAINTS = Path(__file__).parents[1] / "constraints.txt"

_PERMISSIVE = (
    "mit mit-cmu mit-0 bsd bsd-2-clause bsd-3-clause 0bsd apache-2.0 psf-2.0 python-2.0 isc hpnd unlicense zlib"
)
ALLOWED = frozenset((*_PERMISSIVE.split(), "cc0-1.0", "mpl-2.0"))
"""Licences that let it be passed on, with nothing asked for but their text (MPL: and changes to its own files)."""

SAID_ELSEWHERE = {"axe-playwright-python": "mit", "promql-parser": "mit"}
"""Of distributions that say nothing: what the licence file of their project says."""

_NAMES = (
    ("apache", "apache-2.0"),
    ("mozilla public license 2.0", "mpl-2.0"),
    ("mpl-2.0", "mpl-2.0"),
    ("python software foundation", "psf-2.0"),
    ("psf", "psf-2.0"),
    ("bsd", "bsd"),
    ("mit", "mit"),
    ("isc", "isc"),
    ("hpnd", "hpnd"),
    ("unlicense", "unlicense"),
    ("zlib", "zlib"),
)
"""How licences are called where no SPDX expression is given: the first that is one of the words."""
_MORE = re.compile(r"gpl|gnu|affero|commercial|proprietary", re.IGNORECASE)
"""Words beside which another licence does not count."""


def shipped() -> frozenset[str]:
    found = re.findall(r"^([A-Za-z0-9._-]+)==", CONSTRAINTS.read_text(), re.M)
    return frozenset(map(normal, found))


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def licence_of(distribution: Distribution) -> str:
    """An SPDX expression, as given or made of the words that are; empty when nothing is said."""
    known = distribution.metadata.json
    if expression := known.get("license_expression"):
        return str(expression).lower()
    classifiers = [each.rpartition("::")[2] for each in known.get("classifier", ()) if each.startswith("License ::")]
    words = " ".join(classifiers) or str(known.get("license", "")).partition("\n")[0]
    found = "" if _MORE.search(words) else next((name for text, name in _NAMES if _is_in(text, words)), "")
    return found or words.strip().lower() or SAID_ELSEWHERE.get(normal(str(known["name"])), "")


def _is_in(text: str, words: str) -> bool:
    """As a word of its own: there is a `mit` in `limited`, too."""
    return re.search(rf"\b{re.escape(text)}\b", words, re.IGNORECASE) is not None


def is_allowed(licence: str) -> bool:
    """Of licences joined by `or` one has to be allowed, by `and` each."""
    either = re.split(r"\s+or\s+", licence.replace("(", " ").replace(")", " ").strip())
    return any(all(part.strip() in ALLOWED for part in re.split(r"\s+and\s+", each)) for each in either)


def refused_licences(installed: Iterable[Distribution]) -> Iterator[str]:
    ours = shipped()
    for distribution in installed:
        name = normal(distribution.metadata["Name"])
        licence = licence_of(distribution)
        if name in ours:
            print(f"  {name} {distribution.version}: {licence}")
        if not is_allowed(licence):
            yield f"{name} {distribution.version}: {licence or 'no licence'}"


def known_holes(pip_audit: str) -> list[str] | str:
    """Holes in what is shipped, or the reason why nobody knows: also when only of one of them nobody does."""
    command = [pip_audit, "--requirement", str(CONSTRAINTS), "--disable-pip", "--require-hashes", "--format", "json"]
    try:
        done = subprocess.run([*command, "--progress-spinner", "off"], capture_output=True, text=True, timeout=300)
        answer = json.loads(done.stdout)["dependencies"]
    except OSError as error:
        return f"pip-audit cannot be run: {error.strerror}"
    except subprocess.TimeoutExpired:
        return "pip-audit did not end"
    except (ValueError, KeyError, TypeError):
        return done.stderr.strip().rpartition("\n")[2] or f"pip-audit ended with {done.returncode}"
    left_out = sorted(shipped() - {normal(each["name"]) for each in answer})
    skipped = [f"{each['name']}: {each['skip_reason']}" for each in answer if "skip_reason" in each]
    skipped += [f"{name}: not in the answer" for name in left_out]
    holes = [
        f"{each['name']} {each['version']}: {hole['id']}, mended in {', '.join(hole['fix_versions']) or 'no release'}"
        for each in answer
        for hole in each.get("vulns", ())
    ]
    print(*(f"not looked up: {each}" for each in skipped), sep="\n", end="\n" * bool(skipped))
    return holes if holes or not skipped else skipped[0]


def main(arguments: Sequence[str], installed: Iterable[Distribution]) -> int:
    """`arguments`: where pip-audit is."""
    print("licences of what is shipped:")
    refused = list(refused_licences(installed))
    for line in refused:
        print(f"not on the list of licences: {line}")
    holes = known_holes(arguments[0])
    if isinstance(holes, str):
        print(f"holes: NOT ASKED, for the database could not be: {holes}")
    else:
        print(f"holes that are known: {len(holes)}", *holes, sep="\n  ")
    is_asked = not isinstance(holes, str)
    return 1 if refused or (holes and is_asked) or (not is_asked and os.environ.get("GITHUB_ACTIONS") == "true") else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], distributions()))
