"""An auction as an own protocol."""
