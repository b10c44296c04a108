"""deepc inside other libraries' training loops. Nothing here is imported by `import deepc`."""
