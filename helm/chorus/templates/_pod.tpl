{{/* Parts of the server's pod. */}}
{{- define "chorus.serverEnv" -}}
{{ include "chorus.addressEnv" . }}
{{- if and (ne .Values.engine.type "vllm") (kindIs "invalid" .Values.engine.numThreads) (hasKey ((.Values.resources | default dict).requests | default dict) "cpu") }}
# The node's cores are what a container sees; its share of them is this.
- name: CHORUS_NUM_THREADS
  valueFrom:
    resourceFieldRef:
      containerName: chorus
      resource: requests.cpu
{{- end }}
{{ include "chorus.cacheEnv" . }}
{{- if include "chorus.hasDownload" . }}
- name: HF_HUB_CACHE
  value: {{ .Values.model.mountPath }}
{{- end }}
{{- if ne .Values.model.source "hub" }}
- name: HF_HUB_OFFLINE
  value: "1"
{{- else }}
{{- include "chorus.hubEnv" . }}
{{- end }}
{{- with .Values.engine.upstream.apiKeySecret }}
{{- if .name }}
- name: CHORUS_UPSTREAM_API_KEY
  valueFrom:
    secretKeyRef:
      name: {{ .name }}
      key: {{ .key }}
{{- end }}
{{- end }}
{{- end }}

{{- define "chorus.serverMounts" -}}
{{ include "chorus.scratchMounts" . }}
{{- if include "chorus.hasModelVolume" . }}
- name: model
  mountPath: {{ .Values.model.mountPath }}
  readOnly: true
{{- end }}
{{- if .Values.responses.existingClaim }}
- name: responses
  mountPath: {{ .Values.responses.mountPath }}
{{- end }}
{{- if .Values.apiKeys.existingSecret }}
- name: api-keys
  mountPath: /etc/chorus/api-keys
  readOnly: true
{{- end }}
{{- end }}

{{- define "chorus.serverVolumes" -}}
{{ include "chorus.scratchVolumes" . }}
{{- if include "chorus.hasModelVolume" . }}
{{ include "chorus.modelVolume" . }}
{{- end }}
{{- with .Values.responses.existingClaim }}
- name: responses
  persistentVolumeClaim:
    claimName: {{ . }}
{{- end }}
{{- with .Values.apiKeys }}
{{- if .existingSecret }}
- name: api-keys
  secret:
    secretName: {{ .existingSecret }}
    items:
      - key: {{ .key }}
        path: keys
{{- end }}
{{- end }}
{{- end }}

{{- define "chorus.resources" -}}
{{- $resources := deepCopy (.Values.resources | default dict) }}
{{- if eq .Values.device "cuda" }}
{{- $gpus := dict .Values.cuda.resourceName (toString .Values.cuda.count) }}
{{- $resources = merge (dict "limits" $gpus) $resources }}
{{- end }}
{{- toYaml $resources }}
{{- end }}

{{/*
The server's own code gets what the server will ask for, under the same names. With a claim that is full already it
needs the hub no more.
*/}}
{{- define "chorus.downloadContainer" -}}
- name: download
  image: {{ include "chorus.image" . }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  command:
    - python
    - -c
    - |
      import sys
      from engine.model_files import hub_snapshot
      print(hub_snapshot(sys.argv[1], with_code=sys.argv[2] == "true"))
    - {{ .Values.model.id | quote }}
    - {{ .Values.engine.trustRemoteCode | default false | quote }}
  env:
    {{- include "chorus.addressEnv" . | nindent 4 }}
    {{- include "chorus.cacheEnv" . | nindent 4 }}
    - name: HF_HUB_CACHE
      value: {{ .Values.model.mountPath }}
    {{- include "chorus.hubEnv" . | nindent 4 }}
  resources:
    {{- toYaml (.Values.resources | default dict) | nindent 4 }}
  securityContext:
    {{- include "chorus.securityContext" . | nindent 4 }}
  volumeMounts:
    {{- include "chorus.scratchMounts" . | nindent 4 }}
    - name: model
      mountPath: {{ .Values.model.mountPath }}
{{- end }}
