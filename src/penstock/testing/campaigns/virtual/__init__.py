"""Lives on a machine in memory (`penstock.testing.machine`): crashed anywhere (c2), and on bad disks (c5)."""
