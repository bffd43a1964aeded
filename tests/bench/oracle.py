"""Compare `evaluate` with the independently written judge on many tuples.

`python -m tests.bench.oracle --tuples 1000000 --seed 7`. Exit status: 0 when they agree on all.
"""

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice

from sbxd.policy.addresses import parse_address
from sbxd.policy.egress import Allowed, Refused, evaluate
from tests.properties.egress_oracle import Tuple, Verdict, judged, questions

SHOWN_MAX = 20
LOOKED_UP = frozenset(
    {"allowed", "no_address", "address_malformed", "address_refused", "host_network"}
)


@dataclass
class Comparison:
    """What came of it. lookups_wrong: tuples with more or fewer lookups than one when a rule
    covers the request, or any when none does."""

    outcomes: "Counter[str]" = field(default_factory=Counter)
    disagreements: list[tuple[Tuple, Verdict, Verdict]] = field(default_factory=list)
    lookups_wrong: list[Tuple] = field(default_factory=list)


def verdict_of(question: Tuple) -> tuple[Verdict, int]:
    """What the product says, and how many lookups it made."""
    lookups = 0

    async def resolve(name: str) -> Sequence[str]:
        nonlocal lookups
        lookups += 1
        # Another answer each time: whoever looks twice sees something else.
        return question.answers if lookups == 1 else ("127.0.0.1",)

    coroutine = evaluate(
        question.policy, question.host, question.port, resolve, question.host_network
    )
    try:
        coroutine.send(None)
    except StopIteration as end:
        decision: Allowed | Refused = end.value
    else:
        raise AssertionError("evaluate awaited something besides its resolver")
    if isinstance(decision, Refused):
        return Verdict(str(decision.reason)), lookups
    dialled = tuple(
        parsed.value.to_bytes(4 if parsed.version == 4 else 16, "big")
        for parsed in map(parse_address, decision.addresses)
    )
    return Verdict("allowed", dialled), lookups


def compare(tuples: Iterable[Tuple]) -> Comparison:
    """Ask both judges."""
    found = Comparison()
    for question in tuples:
        ours, lookups = verdict_of(question)
        theirs = judged(question)
        found.outcomes[theirs.outcome] += 1
        if ours != theirs:
            found.disagreements.append((question, ours, theirs))
        if lookups != (theirs.outcome in LOOKED_UP):
            found.lookups_wrong.append(question)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tuples", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    started = time.monotonic()
    found = compare(islice(questions(random.Random(options.seed)), options.tuples))
    print(f"{options.tuples} tuples, seed {options.seed}, {time.monotonic() - started:.0f} s")
    for outcome, count in found.outcomes.most_common():
        print(f"  {outcome:24} {count}")
    print(f"disagreements: {len(found.disagreements)}; wrong lookups: {len(found.lookups_wrong)}")
    for question, ours, theirs in found.disagreements[:SHOWN_MAX]:
        print(f"  {question}\n    evaluate: {ours}\n    oracle:   {theirs}")
    return 1 if found.disagreements or found.lookups_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
