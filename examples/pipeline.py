"""Use the classifier in a scikit-learn pipeline, with cross-validation.

python examples/pipeline.py [MODEL]
"""

import sys

from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer

from i2cl import I2CLClassifier, load_task


def clean(texts: list[str]) -> list[str]:
    """Strip whitespace, and convert to lower case."""
    return [text.strip().lower() for text in texts]


def main(model: str = "reference") -> None:
    """Print the accuracy of three folds, and the class of a text."""
    task = load_task("mood-colour-1")
    texts = [example.text for example in task.train[:150]]
    classes = [task.labels[example.label] for example in task.train[:150]]
    classifier = I2CLClassifier(model, shots=5, evaluate=0)  # five demonstrations per class
    pipeline = make_pipeline(FunctionTransformer(clean), classifier)
    for fold, accuracy in enumerate(cross_val_score(pipeline, texts, classes, cv=3), start=1):
        print(f"fold {fold}: {accuracy:.2f}")
    pipeline.fit(texts, classes)
    print(pipeline.predict(["  The gloomy baker rested near the harbour during the storm "]))


if __name__ == "__main__":
    main(*sys.argv[1:])
