"""LLaMA-Factory's command line with Muon registered."""

from importlib import import_module

from muonfx.engines.llamafactory import register

if __name__ == "__main__":
    register()
    import_module("llamafactory.v1.launcher").main()
