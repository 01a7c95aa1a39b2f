from .core.anchored import AnchoredConfig as AnchoredConfig, anchor as anchor
from .core.calibration import calibrate as calibrate
from .core.context import (
    extract as extract,
    extract_classes as extract_classes,
)
from .core.injection import Injection as Injection
from .core.recipe import CalibrationConfig as CalibrationConfig, ExtractConfig as ExtractConfig
from .errors import I2CLError as I2CLError
from .experiments.evaluation import evaluate as evaluate, summarize as summarize
from .experiments.records import Run as Run
from .injections.label_prior import with_label_prior as with_label_prior
from .injections.pool import InjectionPool as InjectionPool, predict as predict
from .injections.temperature import with_temperature as with_temperature
from .injections.transfer import TransferConfig as TransferConfig, transfer as transfer
from .interfaces.sklearn import I2CLClassifier as I2CLClassifier
from .labelling import (
    LabelIssue as LabelIssue,
    Suggestion as Suggestion,
    review as review,
    suggest as suggest,
)
from .methods import (
    METHODS as METHODS,
    Method as Method,
    Predictor as Predictor,
    make_methods as make_methods,
)
from .models.architectures import ARCHITECTURES as ARCHITECTURES, Architecture as Architecture
from .models.decoder import Decoder as Decoder
from .tasks import (
    Example as Example,
    Task as Task,
    Template as Template,
    list_tasks as list_tasks,
    load_task as load_task,
)

__version__: str
