"""deepspeed.runtime.pipe: where ranks stand in a pipeline, and DeepSpeed's form of its schedules."""
