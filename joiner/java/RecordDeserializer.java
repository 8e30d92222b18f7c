package roostream;

import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.util.Arrays;
import org.apache.flink.api.common.typeinfo.TypeInformation;
import org.apache.flink.api.common.typeinfo.Types;
import org.apache.flink.connector.kafka.source.reader.deserializer.KafkaRecordDeserializationSchema;
import org.apache.flink.kafka.shaded.org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.flink.types.Row;
import org.apache.flink.util.Collector;

/**
 * Turns a Kafka record into Row(key, envelope). It emits every record, also heartbeats and undecodable ones, because the
 * watermark generator sees only what is emitted here.
 */
public final class RecordDeserializer implements KafkaRecordDeserializationSchema<Row> {
    private static final long serialVersionUID = 1L;
    private final int topic;

    public RecordDeserializer(int topic) {
        this.topic = topic;
    }

    @Override
    public void deserialize(ConsumerRecord<byte[], byte[]> record, Collector<Row> out) {
        byte[] in = Envelope.in(topic, record.partition(), record.offset(), record.timestamp(), record.key(), record.value());
        out.collect(Row.of(keyOf(record.key()), in));
    }

    /** Keys have 8 bytes. A record with another key becomes a dead letter, whichever task receives it. */
    private static long keyOf(byte[] key) {
        if (key != null && key.length == 8) {
            return ByteBuffer.wrap(key).order(ByteOrder.LITTLE_ENDIAN).getLong();
        }
        return Arrays.hashCode(key);
    }

    @Override
    public TypeInformation<Row> getProducedType() {
        return Types.ROW(Types.LONG, Types.PRIMITIVE_ARRAY(Types.BYTE));
    }
}
