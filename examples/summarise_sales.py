"""Summarises a sales table, as a model might write it: revenue by region, month and product.

Reads sales.csv in the working directory; writes summary.csv and monthly/<month>.csv; prints a
table. Standard library only.
"""

import csv
from collections import defaultdict
from pathlib import Path


def main() -> None:
    """Read, add up, write, print."""
    by_region: dict[str, int] = defaultdict(int)
    by_product: dict[str, int] = defaultdict(int)
    by_month: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    rows = 0
    with open("sales.csv", newline="") as table:
        for row in csv.DictReader(table):
            cents = int(row["quantity"]) * int(row["unit_price_cents"])
            by_region[row["region"]] += cents
            by_product[row["product"]] += cents
            by_month[row["date"][:7]][row["region"]] += cents
            rows += 1
    with open("summary.csv", "w", newline="") as out:
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(("kind", "name", "revenue_cents"))
        for kind, totals in (("region", by_region), ("product", by_product)):
            for name, cents in sorted(totals.items()):
                writer.writerow((kind, name, cents))
    Path("monthly").mkdir(exist_ok=True)
    for month, totals in sorted(by_month.items()):
        lines = [f"{region},{cents}\n" for region, cents in sorted(totals.items())]
        Path("monthly", f"{month}.csv").write_text("".join(lines))
    print(f"{rows} orders")
    for title, totals in (("region", by_region), ("product", by_product)):
        for name, cents in sorted(totals.items(), key=lambda item: -item[1]):
            print(f"{title:8} {name:8} {cents / 100:14,.2f}")


if __name__ == "__main__":
    main()
