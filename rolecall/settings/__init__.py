"""The configuration of a run: one YAML file, one section per role, frozen and checked before anything starts.

`load_settings(path, overrides)` is the only way in; unknown keys are errors; relative paths are relative to the file. An override is
`section.key=value`, the value read as YAML. Environment variables are read in environment.py and nowhere else.

A role without an `address` is local: `rolecall train` starts it on a free port. One with an address runs elsewhere and is only called.
"""

from rolecall.settings.advantages import AdvantageSection, GaeAdvantage, GrpoAdvantage, RemaxAdvantage, RlooAdvantage
from rolecall.settings.algorithm import AlgorithmSection
from rolecall.settings.correction import CorrectionSection
from rolecall.settings.data import DataSection, EvaluationSection, EvaluationSet, ModelSection, RunSection, SamplingSection
from rolecall.settings.environment import child_environment, from_environment, incarnation_given, parent_to_die_with, rank_of_process, visible_gpus
from rolecall.settings.kl import ACTOR_BASE, AdaptiveKl, KlEstimator, KlSection
from rolecall.settings.load import load_settings, overrides_from, store_url_file, with_running_store
from rolecall.settings.losses import Aggregation, EntropySection, PolicyLossSection, PpoLoss
from rolecall.settings.reward import (
    BoxedScorer,
    ExactMatchScorer,
    ExternalScorer,
    FormatScorer,
    FunctionScorer,
    JsonScorer,
    LengthScorer,
    MathScorer,
    OverlongScorer,
    RegexScorer,
    RewardComponent,
    RewardSection,
    ScorerSection,
)
from rolecall.settings.run import RunSettings
from rolecall.settings.section import CheckpointUrl, ConfigPath, NonNegativeFloat, NonNegativeInt, Pattern, Section, ServiceSection, UnitFloat
from rolecall.settings.services import (
    ControllerSection,
    LauncherSection,
    RolloutSection,
    RpcSection,
    StoreSection,
    TelemetrySection,
    TlsSection,
    TrackersSection,
    WeightsSection,
)
from rolecall.settings.trainers import ActorSection, CriticSection, LoraSection, OptimizerSection, ParallelSection, ReferenceSection, TrainerSection

__all__ = [
    "ACTOR_BASE",
    "ActorSection",
    "AdaptiveKl",
    "AdvantageSection",
    "Aggregation",
    "AlgorithmSection",
    "BoxedScorer",
    "CheckpointUrl",
    "ConfigPath",
    "ControllerSection",
    "CorrectionSection",
    "CriticSection",
    "DataSection",
    "EntropySection",
    "EvaluationSection",
    "EvaluationSet",
    "ExactMatchScorer",
    "ExternalScorer",
    "FormatScorer",
    "FunctionScorer",
    "GaeAdvantage",
    "GrpoAdvantage",
    "JsonScorer",
    "KlEstimator",
    "KlSection",
    "LauncherSection",
    "LengthScorer",
    "LoraSection",
    "MathScorer",
    "ModelSection",
    "NonNegativeFloat",
    "NonNegativeInt",
    "OptimizerSection",
    "OverlongScorer",
    "ParallelSection",
    "Pattern",
    "PolicyLossSection",
    "PpoLoss",
    "ReferenceSection",
    "RegexScorer",
    "RemaxAdvantage",
    "RewardComponent",
    "RewardSection",
    "RlooAdvantage",
    "RolloutSection",
    "RpcSection",
    "RunSection",
    "RunSettings",
    "SamplingSection",
    "ScorerSection",
    "Section",
    "ServiceSection",
    "StoreSection",
    "TelemetrySection",
    "TlsSection",
    "TrackersSection",
    "TrainerSection",
    "UnitFloat",
    "WeightsSection",
    "child_environment",
    "from_environment",
    "incarnation_given",
    "load_settings",
    "overrides_from",
    "parent_to_die_with",
    "rank_of_process",
    "store_url_file",
    "visible_gpus",
    "with_running_store",
]
