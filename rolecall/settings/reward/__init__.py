"""The sections under `reward`: scorers, rubrics of judges, components, the service."""
