"""Messages and batches: protobuf records, feature blocks, one decoder and one encoder, columnar batches."""
