"""The folder of a run and its metrics: schema, writer, reader."""
