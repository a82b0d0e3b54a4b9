"""The plug-in's settings, beside kvferry's own."""

from __future__ import annotations

from pydantic_settings import BaseSettings, SettingsConfigDict

from kvferry import Settings


class PluginSettings(BaseSettings):
    """Settings of the plug-in. Each is an environment variable: `replaces_nixl` is KVFERRY_SGLANG_REPLACES_NIXL.

    Attributes:
        replaces_nixl: whether kvferry also answers to SGLang's own backend name `nixl`.
    """

    model_config = SettingsConfigDict(env_prefix="KVFERRY_SGLANG_", frozen=True)

    replaces_nixl: bool = False


class PluginChoice(BaseSettings):
    """What SGLang reads of its environment before it looks for plug-ins.

    Attributes:
        plugins: SGLANG_PLUGINS, the only ones that it loads, separated by commas; all if empty.
    """

    model_config = SettingsConfigDict(env_prefix="SGLANG_", frozen=True)

    plugins: str = ""


def settings_beside(bootstrap_timeout_s: float, waiting_timeout_s: float) -> Settings:
    """Reads kvferry's settings; timeouts that the user did not set follow SGLang's own, which mean the same."""
    settings = Settings()
    unset = {
        name: value
        for name, value in (("bootstrap_timeout_s", bootstrap_timeout_s), ("waiting_timeout_s", waiting_timeout_s))
        if name not in settings.model_fields_set
    }
    return settings.model_copy(update=unset)
