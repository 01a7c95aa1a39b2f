"""Help people label texts: `suggest` chooses what to label, `review` finds labels that are probably wrong."""

from i2cl.labelling.label_issues import LabelIssue, review
from i2cl.labelling.suggestion import Suggestion, suggest, text_vectors

__all__ = ["LabelIssue", "Suggestion", "review", "suggest", "text_vectors"]
