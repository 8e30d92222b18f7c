package roostream;

import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.util.Arrays;
import org.apache.flink.connector.kafka.sink.KafkaRecordSerializationSchema;
import org.apache.flink.kafka.shaded.org.apache.kafka.clients.producer.ProducerRecord;

/** Turns an output of the joiner into a keyed Kafka record; Kafka's partitioner (murmur2 of the key) chooses the partition. */
public final class OutputSerializer implements KafkaRecordSerializationSchema<byte[]> {
    private static final long serialVersionUID = 1L;
    private final String[] topics;

    /** Topic names, comma-separated, in the order of OUTPUTS in joiner/outputs.py. */
    public OutputSerializer(String topics) {
        this.topics = topics.split(",");
    }

    @Override
    public ProducerRecord<byte[], byte[]> serialize(byte[] out, KafkaSinkContext context, Long timestamp) {
        ByteBuffer in = ByteBuffer.wrap(out).order(ByteOrder.LITTLE_ENDIAN);
        String topic = topics[in.get()];
        long time = in.getLong();
        int value = Envelope.OUT_HEAD + in.getInt();
        byte[] key = Arrays.copyOfRange(out, Envelope.OUT_HEAD, value);
        // Kafka refuses negative times. Only MIN_VALUE (now) is negative here.
        Long stamp = time < 0 ? null : time;
        return new ProducerRecord<>(topic, null, stamp, key, Arrays.copyOfRange(out, value, out.length));
    }
}
