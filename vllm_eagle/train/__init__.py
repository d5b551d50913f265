"""Train a head for a model: answers, features, fit, evaluation, export. Nothing here needs an engine."""
