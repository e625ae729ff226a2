"""Graphs and tables -> bundle -> registry -> champion."""
