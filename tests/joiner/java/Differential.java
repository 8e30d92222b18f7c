package roostream;

import java.io.DataInputStream;
import java.io.DataOutputStream;
import java.io.EOFException;
import java.io.IOException;
import org.apache.flink.types.Row;

/** Reads records (timestamp, length, value) from standard input. For each it writes whether the filter keeps it, its time signal, and the event time that the partition has reached. */
public final class Differential {
    public static void main(String[] args) throws IOException {
        DataInputStream in = new DataInputStream(new java.io.BufferedInputStream(System.in));
        DataOutputStream out = new DataOutputStream(new java.io.BufferedOutputStream(System.out));
        EventFilter filter = new EventFilter();
        EventTime time = new EventTime(0, Long.parseLong(args[0]), Long.parseLong(args[1]));
        long timeout = Long.parseLong(args[1]);
        if (args.length > 2 && args[2].equals("restored")) {
            PartitionTime.continueTask();
        }
        int count = 0;
        while (true) {
            long timestamp;
            try {
                timestamp = in.readLong();
            } catch (EOFException end) {
                break;
            }
            byte[] value = new byte[in.readInt()];
            in.readFully(value);
            byte[] envelope = Envelope.in(0, 0, 0, timestamp, null, value);
            TimeSignal signal = TimeSignal.of(envelope);
            if (++count % 100 == 0) { // a restore between two records must change nothing
                byte[] stored = PartitionTime.ofTask(0).encode(0);
                PartitionTime.ofTask().clear();
                PartitionTime.restore(stored);
            }
            time.observe(PartitionTime.ofTask(0), signal);
            out.writeByte(filter.filter(Row.of(0L, envelope)) ? 1 : 0);
            out.writeByte(signal.kind.ordinal());
            out.writeLong(signal.timeMs);
            out.writeLong(PartitionTime.ofTask(0).reachedMs(timeout));
        }
        out.flush();
    }
}
