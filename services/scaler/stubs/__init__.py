"""Generated from protos/keda by `make protos`: `externalscaler_pb2`, `externalscaler_pb2_grpc`."""
