"""deepc inside other libraries' training loops: public names of deepc.compat. Not imported by `import deepc`."""
