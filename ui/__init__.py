"""The page: composition, components, handlers and the web server. Imports the engine's types, never torch."""
