"""ZeRO-3's streamed mode: a rank has storage for a unit of parameters only while the unit is used. state: the model
states; units: which units are there, and when; saved: what autograd keeps of them."""
