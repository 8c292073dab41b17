"""Proxima beside TRL 1.12 on a real model: reward models and PPO, on the same data and settings.

Both run in one environment that has both (`make peer`). docs/peers.md has the commands.
"""
