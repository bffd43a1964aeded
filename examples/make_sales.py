"""Writes the sales table of the demo: the same 12,000 rows every time.

Usage: python3 make_sales.py > sales.csv
"""

import csv
import random
import sys
from datetime import date, timedelta

REGIONS = ("north", "east", "south", "west")
PRODUCTS = {"anvil": 4950, "bolt": 35, "crate": 1200, "drill": 8900, "easel": 2750}
ROWS = 12_000


def main() -> None:
    """Print the table."""
    draw = random.Random(20260101)  # noqa: S311  (made-up data)
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(("order", "date", "region", "product", "quantity", "unit_price_cents"))
    start = date(2025, 1, 1)
    for order in range(1, ROWS + 1):
        product = draw.choice(tuple(PRODUCTS))
        writer.writerow(
            (
                order,
                (start + timedelta(days=draw.randrange(365))).isoformat(),
                draw.choice(REGIONS),
                product,
                draw.randint(1, 40),
                round(PRODUCTS[product] * draw.uniform(0.85, 1.15)),
            )
        )


if __name__ == "__main__":
    main()
