"""Rankers and bundles -> measured quality."""
