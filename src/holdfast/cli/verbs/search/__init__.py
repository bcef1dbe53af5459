"""The verbs that find snapshots: list them, show where they came from, and find the first bad one."""
