"""Evaluation of one fit, for the command line, the server and `I2CLClassifier`.

Three functions matter, in the order in which they are called:

1. `plan_evaluation` chooses the labelled rows: test rows, unused training rows, or a cross-validation.
2. `i2cl.experiments.fitting.fit_task` fits the task, and calls the next one if the plan has rows.
3. `evaluate_fit` scores the fit and its baselines on these rows. It returns the fit with its temperature,
   the weights of its ensemble and its `FitEvaluation`: accuracies with intervals, a verdict (`verdicts`),
   calibration metrics (`i2cl.experiments.confidence`) and, on request, a confidence threshold (`selective`).

Rows are drawn before, with `i2cl.experiments.draw`. Comparisons of methods over seeds and tasks, for reports,
are in `i2cl.experiments.statistics`.
"""
