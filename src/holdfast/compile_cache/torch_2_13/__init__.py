"""Compiles and loads graphs and evaluates guards, with private names of torch 2.13."""
